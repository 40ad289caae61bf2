"""Pictures are files in every format, on a machine that has nothing but what pip brings."""

import re
import sys

import pytest
from matplotlib import image

import backbone_surgery as bs
from backbone_surgery.drawing.picture import make_picture

SIGNATURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".jpg": b"\xff\xd8\xff", ".svg": b"<?xml"}


@pytest.mark.parametrize("ending", list(SIGNATURES))
def test_formats(models, tmp_path, monkeypatch, ending):
    monkeypatch.setenv("PATH", str(tmp_path))  # no program is run
    path = tmp_path / f"model{ending}"
    assert bs.plot_model(models("nested"), str(path)) is None
    assert path.read_bytes().startswith(SIGNATURES[ending])


@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", ["steered", "conditioned, with caches", "nested"])
def test_the_picture_names_every_node_and_frame(models, tmp_path, name, expand, shapes):
    path = tmp_path / "model.svg"
    bs.plot_model(models(name), str(path), expand_nested=expand, show_shapes=shapes)
    written = re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())
    picture = make_picture(models(name), expand)
    expected = [frame.name for frame in picture.frames]
    for node in picture.nodes:
        expected += [node.name, node.description, *(node.shapes if shapes else ())]
    assert written == expected


def test_colours_tell_the_kinds(models, tmp_path):
    path = tmp_path / "model.svg"
    bs.plot_model(models("steered"), str(path), expand_nested=True)
    fills = re.findall(r"fill: (#\w+)", path.read_text())
    assert fills.count("#0969da") == 6  # three caches, before and after
    assert fills.count("#bc4c00") == 3
    assert fills.count("#1a7f37") == 3  # doubled, scale_mood, steer_mood


def test_rankdir_and_dpi_choose_the_size(models, tmp_path):
    def size(**kwargs):
        path = tmp_path / "model.png"
        bs.plot_model(models("nested"), path, **kwargs)
        return image.imread(path).shape[:2]

    (height, width), (wide_height, wide_width) = size(), size(rankdir="LR")
    assert height > width
    assert wide_width > wide_height
    assert size(dpi=192) == pytest.approx((2 * height, 2 * width), abs=1)


def test_dollar_signs_are_text(tmp_path):
    import keras

    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.layers.Dense(2, name="$a^b$")(x))
    bs.plot_model(model, str(tmp_path / "model.svg"))
    assert ">$a^b$</text>" in (tmp_path / "model.svg").read_text()


@pytest.mark.parametrize("package", ["matplotlib", "pygraphviz"])
def test_a_missing_package_says_how_to_get_it(models, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(bs.SurgeryError, match=rf"Run `pip install {package}`.*to_mermaid"):
        bs.plot_model(models("nested"), str(tmp_path / "model.png"))


@pytest.mark.parametrize("name", ["model.xyz", "model", "missing/model.png"])
def test_bad_files_are_refused(models, tmp_path, name):
    with pytest.raises(bs.SurgeryError, match="expected a file in a folder that exists"):
        bs.plot_model(models("nested"), str(tmp_path / name))


def test_a_bad_rankdir_is_refused(models, tmp_path):
    with pytest.raises(bs.SurgeryError, match=r"rankdir to be one of TB, LR\. Received 'BT'"):
        bs.plot_model(models("nested"), str(tmp_path / "model.png"), rankdir="BT")
