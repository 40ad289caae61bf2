"""The clone engine. Private names of Keras are used in this package alone."""

from backbone_surgery.graph.building import building, once
from backbone_surgery.graph.keras_private import (
    LISTS_OF_LAYERS,
    array_of,
    as_stored,
    autocasting,
    drop_kernel,
    infer,
    is_auto_named,
    is_made_up,
    layers_within,
    members_running,
    members_tracking,
    own_weights,
    sublayers,
    values_as_assigned,
    watching_calls,
    without_values,
)
from backbone_surgery.graph.nodes import (
    all_nodes,
    as_functional,
    graph_nodes,
    in_order,
    is_input,
    is_plain_call,
    node_of,
    topological_nodes,
)
from backbone_surgery.graph.rebuild import nest
from backbone_surgery.graph.replay import (
    KEEP,
    CloneFn,
    clone_layer_graph,
    replay,
    visited_node,
)
from backbone_surgery.graph.shared_nodes import share
from backbone_surgery.graph.stages import Stage, Stages

__all__ = [
    "KEEP",
    "LISTS_OF_LAYERS",
    "CloneFn",
    "Stage",
    "Stages",
    "all_nodes",
    "array_of",
    "as_functional",
    "as_stored",
    "autocasting",
    "building",
    "clone_layer_graph",
    "drop_kernel",
    "graph_nodes",
    "in_order",
    "infer",
    "is_auto_named",
    "is_input",
    "is_made_up",
    "is_plain_call",
    "layers_within",
    "members_running",
    "members_tracking",
    "nest",
    "node_of",
    "once",
    "own_weights",
    "replay",
    "share",
    "sublayers",
    "topological_nodes",
    "values_as_assigned",
    "visited_node",
    "watching_calls",
    "without_values",
]
