"""Imports inside the package point one way only: from the last layer of the list to the first."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "backbone_surgery"

LAYERS = [
    ["errors", "startup", "version", "training"],
    ["emission"],
    ["graph"],
    ["attention", "layers", "projection", "site", "backbone", "checkpoint", "twin"],
    ["families"],
    ["opening", "cache"],
    ["rewrites", "operate", "rewire", "nested"],
    ["generation", "vectors", "sweep", "weights", "plotting", "picture", "checking"],
    ["analysis", "figures"],
    ["__init__", "cli", "__main__"],
]
"""What stands in one entry may import one another, but never in a circle."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


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


def top(module):
    return module.partition(".")[0]


def violations(sources):
    """Return a sentence for each import, or circle of imports, that should not be."""
    graph = {name: imports(source, sources) - {name} for name, source in sources.items()}
    found = []
    for name, targets in graph.items():
        if top(name) not in RANK:
            found.append(f"{name}: unknown module; place it in LAYERS of tests/test_layering.py")
            continue
        for target in targets:
            if RANK.get(top(target), -1) > RANK[top(name)]:
                found.append(f"{name} imports {target}, which is in a later layer")
            family = top(name) == "families" and name != "families"
            if family and top(target) == "families" and target != "families.family":
                found.append(f"{name} imports {target}: families never import one another")
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


def test_the_check_reads_the_whole_package():
    sources = modules()
    assert {"__init__", "graph", "families", "families.family", "rewrites.rewrite"} <= set(sources)
    assert imports(sources["graph"], sources) == {"emission", "errors"}
    assert {"graph", "families"} <= imports(sources["opening"], sources)
    assert imports(sources["families.gpt2"], sources) >= {"attention", "families.family"}


SOUND = {
    "__init__": "from backbone_surgery.graph import clone_layer_graph",
    "errors": "",
    "graph": "import keras\nfrom backbone_surgery.errors import SurgeryError",
    "attention": "from backbone_surgery import graph",
    "backbone": "from backbone_surgery.attention import Attention",
    "families": "from backbone_surgery.families.family import Family",
    "families.family": "from backbone_surgery import graph",
    "families.one": "from backbone_surgery.families.family import Family",
    "generation": "",
    "generation.engine": "from backbone_surgery.generation.buckets import bucket",
    "generation.buckets": "",
    "cli": "def main():\n    import backbone_surgery",
}


def test_made_up_package_in_order_passes():
    assert violations(SOUND) == []


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("graph", "from backbone_surgery.backbone import X", "graph imports backbone"),
        ("graph", "import backbone_surgery.cli as c", "graph imports cli"),
        ("errors", "from backbone_surgery import graph", "errors imports graph"),
        ("graph", "def f():\n    from backbone_surgery import cli", "graph imports cli"),
        ("graph", "from backbone_surgery import Steer", "graph imports __init__"),
        ("graph", "import backbone_surgery", "graph imports __init__"),
        ("families.two", "from backbone_surgery.families.one import F", "one another"),
        ("families.two", "from backbone_surgery.families import one", "one another"),
        ("families.two", "from backbone_surgery.families import FAMILIES", "one another"),
        ("attention", "from backbone_surgery import backbone", "a circle"),
        ("generation.buckets", "import backbone_surgery.generation.engine", "a circle"),
        ("new_thing", "", "place it in LAYERS of tests/test_layering.py"),
        ("new_thing.part", "", "place it in LAYERS of tests/test_layering.py"),
    ],
)
def test_made_up_violation_is_found(module, source, words):
    found = violations({**SOUND, module: source})
    assert any(words in sentence for sentence in found), found
