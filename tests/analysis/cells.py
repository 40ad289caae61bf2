"""Cells of a patching grid, each by one uncached pass of the patched model."""

import numpy as np

import backbone_surgery as bs


def logits_of_cells(lm, clean, corrupted, at, cells, controls=None):
    """Patch a site and a token of the corrupted text, for each cell.

    Args:
        lm: the model.
        clean: token ids.
        corrupted: token ids, as many.
        at: site selector.
        cells: pairs of the index of a site and of a token.
        controls: `{input name: array of one row}` of the model's own rewrites.

    Returns:
        float[cells, vocabulary], the logits of the next token.
    """
    own = {name: np.asarray(value)[None] for name, value in (controls or {}).items()}
    texts = [
        {"token_ids": np.array([ids]), "padding_mask": np.ones((1, len(ids)), "int32"), **own}
        for ids in (clean, corrupted)
    ]
    edits = [("patch", at)]
    beside = (
        f"{at}.{lm.opened.family.beside}"  # the other streams of whole blocks, if there are any
    )
    if at == "blocks.*" and f"blocks.0.{beside.rpartition('.')[2]}" in bs.sites(lm.opened):
        edits.append(("beside", beside))
    captures = bs.Capture(*(where for _, where in edits), name="seen")
    captures = bs.operate(lm.opened, [captures]).predict_on_batch(texts[0])["captures"]
    patching = bs.operate(lm.opened, [bs.Patch(where, name=name) for name, where in edits])
    reports = patching.report[-len(edits) :]  # after those of the model's own
    rows = []
    for site, token in cells:
        patch = {}
        for (name, _), report in zip(edits, reports, strict=True):
            patch[f"{name}_positions"] = np.full((1, len(report.sites), 1), -1)
            patch[f"{name}_positions"][0, site] = token
            for i, path in enumerate(report.sites):
                value = np.asarray(captures[f"seen/{path}"])[:, token : token + 1]
                patch[f"{name}_value_{i}"] = value
        outputs = patching.predict_on_batch({**texts[1], **patch})
        hidden = patching.hidden_states(outputs)
        rows.append(np.asarray(lm.opened.token_embedding(hidden[:, -1], reverse=True))[0])
    return np.array(rows)
