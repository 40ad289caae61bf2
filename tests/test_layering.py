"""Imports inside the package point one way: each package imports only those before it."""

import ast
import re
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "backbone_surgery"

ORDER = [
    "errors",
    "extras",
    "contexts",
    "numbers",
    "version",
    "bundled",
    "startup",
    "files",
    "hosts",
    "target",
    "kernels",
    "products",
    "graph",
    "opening",
    "families",
    "rewriting",
    "caching",
    "byte_pairs",
    "hugging_face",
    "presets",
    "meshes",
    "weights",
    "recipes",
    "generation",
    "vectors",
    "analysis",
    "tuning",
    "planning",
    "datasets",
    "drawing",
    "serving",
    "__init__",
    "cli",
]
"""The packages, and the modules at the root, in the order of the data: see docs/architecture.md."""

RANK = {name: rank for rank, name in enumerate(ORDER)}


def modules(root=ROOT / PACKAGE):
    """Return `{module: source}`, with modules named as from inside the package."""
    files = {p.relative_to(root).with_suffix("").as_posix(): p for p in root.rglob("*.py")}
    return {
        path.removesuffix("/__init__").replace("/", "."): file.read_text()
        for path, file in files.items()
    }


def imports(source, known):
    """Return the modules of the package that a source file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            head, _, rest = name.partition(".")
            if head == PACKAGE:
                # What is no module is a name in one: cut until a module is left.
                while rest and rest not in known:
                    rest = rest.rpartition(".")[0]
                found.add(rest or "__init__")
    return found


def package(module):
    return module.partition(".")[0]


def violations(sources):
    """Return a sentence for each import that runs back, and for each circle."""
    graph = {name: imports(source, sources) - {name} for name, source in sources.items()}
    found = []
    for name, targets in graph.items():
        own = package(name)
        if own not in RANK:
            found.append(f"{name}: unknown package; place it in ORDER of tests/test_layering.py")
            continue
        for target in targets:
            if RANK.get(package(target), -1) > RANK[own]:
                found.append(f"{name} imports {target}, which comes later")
    return found + [f"{' -> '.join(circle)}: a circle" for circle in circles(graph)]


def circles(graph):
    found, done = [], set()

    def walk(name, path):
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                walk(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def test_imports_point_one_way_only():
    found = violations(modules())
    assert not found, "\n".join(found)


def test_families_do_not_import_one_another():
    sources = modules()
    families = {name for name in sources if re.search(r"^FAMILY = ", sources[name], re.MULTILINE)}
    assert {"families.gpt2", "families.opt"} <= families
    for name in families:
        assert not imports(sources[name], sources) & families, name


def test_the_check_reads_the_whole_package():
    sources = modules()
    assert {"__init__", "graph", "families", "opening.family", "rewriting.rewrite"} <= set(sources)
    assert {"graph.nodes", "errors"} <= imports(sources["graph.replay"], sources)
    assert {"graph", "opening.family"} <= imports(sources["opening.open"], sources)
    gpt2 = imports(sources["families.gpt2"], sources)
    assert gpt2 >= {"families.gpt2_block", "opening.family"}


# Private names of other libraries.


def keras_names():
    """Return the private names that objects of Keras itself have."""
    dense = keras.layers.Dense(2)
    x = keras.Input((3,))
    model = keras.Model(x, dense(x))
    sequential = keras.Sequential([dense])
    objects = [x, dense, dense.kernel, model, sequential, keras.layers.InputLayer((3,))]
    return {name for thing in objects for name in dir(thing) if is_private(name)}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_uses(module, source):
    """Return the private modules and names of other libraries that a module uses.

    Attributes of `self` that the module defines are its own. A family may use private attributes of
    KerasHub, which does not export its decoder blocks, but none that Keras has.
    """
    nodes = list(ast.walk(ast.parse(source)))
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    defined |= {n.attr for n in nodes if is_own(n) and isinstance(n.ctx, ast.Store)}
    defined |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    formats = {id(part) for n in nodes if isinstance(n, ast.JoinedStr) for part in n.values}
    uses = set()
    for node in nodes:
        name = ""
        if isinstance(node, ast.Import):
            uses |= {alias.name for alias in node.names if "src" in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            uses |= {name for name in names if "src" in name.split(".")}
        elif isinstance(node, ast.Attribute) and node.attr == "src":
            uses.add(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and not (is_own(node) and node.attr in defined):
            name = node.attr
        elif isinstance(node, ast.Constant) and id(node) not in formats:
            name = node.value if node.value in KERAS else ""
        if is_private(name) and name not in ("_fields", "_replace", "_exit"):
            uses.add(name)
    if package(module) == "families":
        uses = {u for u in uses if u in KERAS or f"{u}.".startswith("keras.src.")}
    return uses


def is_own(node):
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")


KERAS = keras_names()


def test_private_keras_is_in_the_package_graph_alone():
    uses = {name: private_uses(name, source) for name, source in modules().items()}
    assert any(uses[name] for name in uses if package(name) == "graph")
    elsewhere = {name: sorted(u) for name, u in uses.items() if u and package(name) != "graph"}
    assert not elsewhere, f"{elsewhere}: ask backbone_surgery/graph for what needs private Keras"


@pytest.mark.parametrize(
    "source",
    [
        "import keras.src",
        "import keras.src.ops as o",
        "from keras.src import ops",
        "from keras import src",
        "def f():\n    from keras_hub.src.models import x",
        "keras.src.ops",
        "t._keras_history",
        "getattr(t, '_keras_history')",
        "vars(layer)['_inbound_nodes']",
        "layer._inbound_nodes[0]",
        "model._functional",
        "for x in layer._layers: pass",
        "variable._initializer",
        "class A(keras.Model):\n    def f(self):\n        return self._layers",
        "f'{layer._losses}'",
        "row._cache",
    ],
)
def test_private_use_is_found(source):
    assert private_uses("caching.rewire", source)


@pytest.mark.parametrize(
    "source",
    [
        "import keras\nfrom keras import ops, tree",
        "class A:\n    def f(self):\n        self._own = 1\n        return self._own",
        "class A:\n    def _f(self):\n        return self._f()",
        "class A:\n    _f: int = 0\n    def f(self):\n        return self._f",
        "f'{name}_value'",
        "_walk(x)\nrow._replace(x=1)\nx.__dict__",
    ],
)
def test_public_and_own_uses_pass(source):
    assert not private_uses("caching.rewire", source)


def test_families_may_use_private_attributes_of_keras_hub_but_not_of_keras():
    assert not private_uses("families.one", "from keras_hub.src.models import x\nx._dense(y)")
    assert private_uses("families.one", "x._layers") == {"_layers"}
    assert private_uses("families.one", "from keras.src import ops") == {"keras.src.ops"}


# What the check of imports finds.

SOUND = {
    "__init__": "from backbone_surgery.graph import clone_layer_graph",
    "errors": "",
    "graph": "from backbone_surgery.graph.replay import clone_layer_graph",
    "graph.replay": "import keras\nfrom backbone_surgery.errors import SurgeryError",
    "opening": "",
    "opening.family": "from backbone_surgery import graph",
    "families": "from backbone_surgery.families.one import ONE",
    "families.one": "from backbone_surgery.opening.family import Family",
    "generation": "",
    "generation.run_batch": "from backbone_surgery.generation.buckets import bucket",
    "generation.buckets": "",
    "cli": "def main():\n    import backbone_surgery",
}


def test_made_up_package_in_order_passes():
    assert violations(SOUND) == []


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("graph.replay", "from backbone_surgery.opening.family import X", "imports opening.family"),
        ("graph.replay", "import backbone_surgery.cli as c", "graph.replay imports cli"),
        ("errors", "from backbone_surgery import graph", "errors imports graph"),
        ("graph", "def f():\n    from backbone_surgery import cli", "graph imports cli"),
        ("graph", "from backbone_surgery import Steer", "graph imports __init__"),
        ("graph", "import backbone_surgery", "graph imports __init__"),
        ("opening.open", "from backbone_surgery.families import FAMILIES", "which comes later"),
        ("graph.replay", "from backbone_surgery import graph", "a circle"),
        ("generation.buckets", "import backbone_surgery.generation.run_batch", "a circle"),
        ("new_thing", "", "place it in ORDER of tests/test_layering.py"),
        ("new_thing.part", "", "place it in ORDER of tests/test_layering.py"),
    ],
)
def test_made_up_violation_is_found(module, source, words):
    found = violations({**SOUND, module: source})
    assert any(words in sentence for sentence in found), found
