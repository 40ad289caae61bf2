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
    captures = bs.operate(lm.opened, [bs.Capture(at, name="seen")]).predict_on_batch(texts[0])
    patching = bs.operate(lm.opened, [bs.Patch(at)])
    values = [np.asarray(captures["captures"][f"seen/{s}"]) for s in patching.report[-1].sites]
    rows = []
    for site, token in cells:
        positions = np.full((1, len(values), 1), -1)
        positions[0, site] = token
        patch = {f"patch_value_{i}": v[:, token : token + 1] for i, v in enumerate(values)}
        outputs = patching.predict_on_batch({**texts[1], **patch, "patch_positions": positions})
        hidden = patching.hidden_states(outputs)
        rows.append(np.asarray(lm.opened.token_embedding(hidden[:, -1], reverse=True))[0])
    return np.array(rows)
