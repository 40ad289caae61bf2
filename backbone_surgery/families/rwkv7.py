"""RWKV-7: no attention, but a recurrence whose state has one size.

Each block looks at the token before as well, and mixes the first block's values into its own.
KerasHub's backbone ends in a layer that gives logits; the opened graph ends before it, as those of
other families do.
"""

from keras_hub.src.models.rwkv7.rwkv7_layer import RWKV7_Block

from backbone_surgery.errors import SurgeryError
from backbone_surgery.families.rwkv7_block import embed, open_rwkv7_block
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.head import TableAndHead


def head(owner):
    """Return the table that tokens are looked up in, and the layer that gives logits, as one."""
    layers = {layer.name: layer for layer in FAMILY.layers(owner)}
    if FAMILY.ends_in not in layers or FAMILY.embeddings not in layers:
        raise SurgeryError(
            f"open at '{owner.name}': expected layers '{FAMILY.embeddings}' and "
            f"'{FAMILY.ends_in}' in the graph, to make logits with. Received "
            f"{', '.join(layers)}. Keep the backbone's own."
        )
    return TableAndHead(layers[FAMILY.embeddings], layers[FAMILY.ends_in])


FAMILY = Family(
    name="rwkv7",
    block=RWKV7_Block,
    open_block=open_rwkv7_block,
    embed=embed,
    further=("v_first",),
    ends_in="head",
    head=head,
    sampler="top_k",
    model_types=("rwkv7",),
)
"""RWKV-7 "Goose"."""
