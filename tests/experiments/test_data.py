"""The text of the experiments is deterministic, held out properly, and never silently too short."""

import numpy as np
import pytest

from experiments.training import data


@pytest.fixture
def folder(tmp_path):
    """A few files of text, one of them in a subfolder, one in a folder of tests."""
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text of file {number:02d}.\n" * 50)
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "more.txt").write_text("more text.\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.txt").write_text("skipped")
    return tmp_path


def whole(corpus):
    return np.concatenate([corpus.train, corpus.held_out]).tobytes()


def test_the_default_text_is_the_standard_library():
    corpus = data.load(limit_mib=1)
    assert len(corpus.train) + len(corpus.held_out) == 2**20
    assert b"import " in corpus.train.tobytes() and b"import " in corpus.held_out.tobytes()


def test_the_corpus_is_the_same_each_time(folder):
    first, second = data.load(folder), data.load(folder)
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.held_out, second.held_out)


def test_a_folder_is_read_whole_without_its_tests(folder):
    text = whole(data.load(folder))
    assert len(text) == 20 * 50 * len("text of file 00.\n") + len("more text.\n")
    assert b"more text." in text and b"skipped" not in text


def test_a_file_is_split_in_two_disjoint_parts(tmp_path):
    content = np.random.default_rng(0).bytes(1000)
    (tmp_path / "text").write_bytes(content)
    corpus = data.load(tmp_path / "text", held_out_fraction=0.1)
    assert len(corpus.held_out) == 100
    assert whole(corpus) == content


def test_no_more_than_the_limit_is_read(folder):
    assert len(whole(data.load(folder, limit_mib=100 / data.MEBIBYTE))) == 100


def draw(text, **overrides):
    settings = dict(batch_size=4, sequence_length=8, seed=0, step=0)
    return data.batch(text, **(settings | overrides))


def test_a_batch_is_decided_by_seed_and_step():
    text = np.random.default_rng(0).integers(256, size=10_000).astype(np.uint8)
    np.testing.assert_array_equal(draw(text, seed=3, step=5), draw(text, seed=3, step=5))
    assert not np.array_equal(draw(text, seed=3, step=5), draw(text, seed=3, step=6))
    assert not np.array_equal(draw(text, seed=3, step=5), draw(text, seed=4, step=5))


def test_a_batch_holds_windows_of_the_text():
    text = np.arange(200, dtype=np.uint8)
    tokens = draw(text, batch_size=16)
    assert tokens.shape == (16, 9) and tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, tokens[:, :1] + np.arange(9))


def test_every_window_of_the_text_can_be_drawn():
    text = np.arange(12, dtype=np.uint8)
    starts = {int(draw(text, batch_size=1, step=step)[0, 0]) for step in range(100)}
    assert starts == {0, 1, 2, 3}


def test_too_little_text_is_an_error():
    text = np.zeros(36, np.uint8)
    draw(text)
    with pytest.raises(ValueError, match="at least 36 bytes of text, got 35"):
        draw(text[:-1])


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        data.load(tmp_path / "missing")


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="the folder holds no"):
        data.load(tmp_path)
