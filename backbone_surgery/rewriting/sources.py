"""Sources: the input of the computation behind a site, read off the graph."""

import keras

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.site import BlockInput, Place, Site, is_block
from backbone_surgery.rewriting.rewrite import Surgery


def source_of(
    x: keras.KerasTensor, place: Place, surgery: Surgery, operation: str
) -> keras.KerasTensor:
    """Return the one tensor of hidden states that the computation behind a site starts from.

    That is the tensor at the site before it; for a whole block, the block's input.

    Args:
        x: what stands at the site.
        place: the site.
        surgery: the rewrite being applied.
        operation: its name, for the error.

    Raises:
        SurgeryError: the computation starts from several sites, or from none.
    """
    if place.path == f"blocks.{place.block}" and surgery.stream is not None:
        return surgery.stream
    sources: dict[int, tuple[str, keras.KerasTensor]] = {}
    stack = [x]
    while stack:
        tensor = stack.pop()
        layer = graph.node_of(tensor).operation
        if isinstance(layer, Site | BlockInput) or is_block(layer):
            role = layer.role if isinstance(layer, Site) else "the residual stream"
            sources[id(tensor)] = (role, tensor)
        else:
            stack.extend(graph.node_of(tensor).input_tensors)
    if len(sources) != 1 or place.is_pattern:
        named = " and ".join(sorted(role for role, _ in sources.values())) or "no site"
        raise SurgeryError(
            f"{operation} at '{place.path}': expected a site computed from one other site. "
            f"Received one computed from {named}. Choose a projection, such as 'query', "
            "'attention_output', 'mlp_hidden' or 'mlp_output', or a whole block."
        )
    return next(tensor for _, tensor in sources.values())
