"""A folder is replaced whole or not at all, and nothing of others is."""

import pytest

import backbone_surgery as bs
from backbone_surgery.recipes import folder as folders
from backbone_surgery.recipes.folder import new_folder


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.txt")}


def save(path, text):
    with new_folder(path, lambda name: name in ("a.txt", "b/c.txt")) as new:
        (new / "b").mkdir()
        for name in ("a.txt", "b/c.txt"):
            (new / name).write_text(text)


def test_a_folder_is_made_and_replaced(tmp_path):
    for text in ("one", "two"):
        save(tmp_path / "r", text)
        assert contents(tmp_path / "r") == {"a.txt": text, "b/c.txt": text}
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_an_error_leaves_the_old_folder(tmp_path):
    save(tmp_path / "r", "one")
    with pytest.raises(TypeError, match="data must be str"):
        save(tmp_path / "r", None)
    assert contents(tmp_path) == {"r/a.txt": "one", "r/b/c.txt": "one"}


def test_where_folders_cannot_be_exchanged_the_old_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "exchange", lambda a, b: False)
    save(tmp_path / "r", "one")
    with pytest.raises(bs.SurgeryError, match="a file system that exchanges folders in one step"):
        save(tmp_path / "r", "two")
    assert contents(tmp_path) == {"r/a.txt": "one", "r/b/c.txt": "one"}


def test_a_system_without_exchange(tmp_path, monkeypatch):
    save(tmp_path / "r", "one")
    assert not folders.exchange(tmp_path / "r", tmp_path / "none")
    monkeypatch.setattr(folders.sys, "platform", "win32")
    assert not folders.exchange(tmp_path / "r", tmp_path / "r")


def test_nothing_of_others_is_replaced(tmp_path):
    save(tmp_path / "r", "one")
    (tmp_path / "r" / "notes.txt").write_text("mine")
    (tmp_path / "r" / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for path, words in (
        (tmp_path / "r", r"holds \['empty', 'notes.txt'\], which would be lost"),
        (tmp_path / "file", "Received a file"),
        (tmp_path / "link", "Received a link"),
        (tmp_path / "no" / "r", "whose parent does not exist"),
    ):
        with pytest.raises(bs.SurgeryError, match=words):
            save(path, "two")
    assert contents(tmp_path / "r") == {"a.txt": "one", "b/c.txt": "one", "notes.txt": "mine"}
