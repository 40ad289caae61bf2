"""The story grammar agrees with its own checker, and the bundled models are complete."""

import hashlib
import itertools
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import story_grammar as grammar  # noqa: E402

STORIES = 3000
MODELS = ("tiny_gpt2", "tiny_gemma")


@pytest.fixture(scope="module")
def stories():
    rng = Random(0)
    return [grammar.generate_story(rng) for _ in range(STORIES)]


def sentences_of(text):
    return grammar.split_sentences(text)


def test_same_seed_same_story_and_new_seed_new_story():
    first = [grammar.generate_story(Random(seed)) for seed in range(50)]
    assert first == [grammar.generate_story(Random(seed)) for seed in range(50)]
    assert len({story.text for story in first}) == 50


def test_stories_do_not_repeat(stories):
    assert len({story.text for story in stories}) == STORIES


def test_story_has_all_attributes_and_starts_with_its_prompt(stories):
    for story in stories:
        assert story.attributes.keys() == grammar.ATTRIBUTES.keys()
        assert story.text.startswith(story.prompt + " ")
        assert len(sentences_of(story.prompt)) in (1, 2)


def test_fixed_attributes_are_kept():
    for values in itertools.product(*grammar.ATTRIBUTES.values()):
        fixed = dict(zip(grammar.ATTRIBUTES, values, strict=True))
        assert grammar.generate_story(Random(1), **fixed).attributes == fixed


@pytest.mark.by_default(1)
@pytest.mark.parametrize("attribute", grammar.ATTRIBUTES)
def test_checker_agrees_on_whole_stories_and_on_both_halves(stories, attribute):
    for story in stories:
        expected = story.attributes[attribute]
        found = sentences_of(story.text)
        middle = len(found) // 2
        for part in (found, found[:middle], found[middle:]):
            assert grammar.classify(" ".join(part), attribute) == expected, story.text


@pytest.mark.parametrize("attribute", grammar.ATTRIBUTES)
def test_prompts_are_neutral(stories, attribute):
    assert {grammar.classify(story.prompt, attribute) for story in stories} == {None}


def test_classify_reads_text_cut_off_in_the_middle(stories):
    for story in stories[:300]:
        cut = story.text[len(story.text) // 3 : -7]
        assert grammar.classify(cut, "mood") == story.attributes["mood"]


def test_classify_takes_the_majority_and_none_on_a_tie():
    assert grammar.classify("happy happy sad", "mood") == "happy"
    assert grammar.classify("happy sad", "mood") is None
    assert grammar.classify("", "mood") is None


def test_every_sentence_is_well_formed_and_recalls_rightly(stories):
    for story in stories:
        count = len(sentences_of(story.text))
        assert grammar.well_formed(story.text) == (count, count), story.text
        right, total = grammar.recall(story.text)
        assert right == total, story.text
        assert total >= 10


def test_scrambled_sentences_are_not_well_formed(stories):
    rng = Random(1)
    for story in stories[:200]:
        for sentence in sentences_of(story.text):
            words = sentence.rstrip(".").split()
            scrambled = rng.sample(words, len(words))
            if scrambled != words and len(set(words)) > 3:
                # Two names or two things may trade places and still make a sentence.
                moved = sum(a != b for a, b in zip(words, scrambled, strict=True))
                if moved > 4:
                    assert grammar.well_formed(" ".join(scrambled) + ".") == (0, 1), scrambled


@pytest.mark.parametrize(
    "sentence",
    [
        "Once upon a time there was a girl named Tom.",
        "Tom felt happy because she was there.",
        "Tom said that she was very happy.",
        "Lily and Lily happily played a game together.",
        "Lily had a red elephant.",
        "Lily sad put the red ball by the pond.",
        "Lily had a red ball!",
    ],
)
def test_near_misses_are_not_well_formed(sentence):
    assert grammar.well_formed(sentence) == (0, 1)


def test_unfinished_sentence_is_not_counted():
    assert grammar.well_formed("Lily had a red ball. Lily smi") == (1, 1)


def test_recall_catches_a_wrong_name_object_and_room():
    start = "There once was a girl named Lily. Lily had a red ball. Lily was in the park. "
    assert grammar.recall(start + "Lily smiled at the red ball.") == (4, 4)
    assert grammar.recall(start + "Anna smiled at the red ball.") == (3, 4)
    assert grammar.recall(start + "Lily smiled at the red box.") == (3, 4)
    assert grammar.recall(start + "Lily sadly walked across the hall.") == (3, 4)


def test_recall_tells_the_friend_from_the_child():
    start = "There once was a girl named Lily. Lily had a red ball. Lily had a friend named Tom. "
    right, total = grammar.recall(
        start + "Tom had a blue car. Tom happily showed Lily the blue car."
    )
    wrong, same_total = grammar.recall(
        start + "Tom had a blue car. Tom happily showed Lily the red ball."
    )
    assert right == total == same_total == wrong + 1


def test_attributes_are_fair_and_independent(stories):
    # 4.5 standard deviations of a fair coin: a fair generator fails once in 100,000 seeds.
    bound = 4.5 * (STORIES * 0.25) ** 0.5
    for attribute, values in grammar.ATTRIBUTES.items():
        count = sum(story.attributes[attribute] == values[0] for story in stories)
        assert abs(count - STORIES / 2) < bound, attribute
    for one, other in itertools.combinations(grammar.ATTRIBUTES, 2):
        table = Counter((s.attributes[one], s.attributes[other]) for s in stories)
        assert len(table) == 4
        chi_square = sum((n - STORIES / 4) ** 2 / (STORIES / 4) for n in table.values())
        assert chi_square < 25, (one, other, table)


def test_markers_of_the_other_value_never_occur(stories):
    assert all(len(words) >= 5 for words in grammar.markers().values())
    for story in stories:
        words = {word.strip(".,").lower() for word in story.text.split()}
        for (attribute, value), marks in grammar.markers().items():
            assert bool(words & marks) == (story.attributes[attribute] == value), story.text


def test_openings_do_not_predict_attributes(stories):
    for attribute, values in grammar.ATTRIBUTES.items():
        by_opening = {}
        for story in stories:
            opening = sentences_of(story.text)[0].split(" named")[0]
            by_opening.setdefault(opening, []).append(story.attributes[attribute] == values[0])
        for opening, hits in by_opening.items():
            assert abs(sum(hits) / len(hits) - 0.5) < 4.5 * 0.5 / len(hits) ** 0.5, opening


def test_stories_have_100_to_180_words_and_points(stories):
    lengths = [len(story.text.split()) + story.text.count(".") for story in stories]
    assert min(lengths) >= 100
    assert max(lengths) <= 180


def test_vocabulary_is_a_few_hundred_words(stories):
    words = {word.strip(".,") for story in stories for word in story.text.split()}
    assert 150 < len(words) < 400


@pytest.mark.by_default(1)
@pytest.mark.parametrize("attribute", grammar.ATTRIBUTES)
def test_contrast_pairs_differ_in_their_attribute_only(attribute):
    for first, second in grammar.contrast_pairs(attribute, Random(2), 100):
        assert first != second
        assert len(sentences_of(first)) == len(sentences_of(second))
        found = [
            {name: grammar.classify(text, name) for name in grammar.ATTRIBUTES}
            for text in (first, second)
        ]
        assert tuple(values.pop(attribute) for values in found) == grammar.ATTRIBUTES[attribute]
        assert found[0] == found[1]
        for one, other in zip(sentences_of(first), sentences_of(second), strict=True):
            shown = {grammar.classify(one, attribute), grammar.classify(other, attribute)}
            assert one == other or shown & set(grammar.ATTRIBUTES[attribute])


def test_contrast_pairs_are_cut_at_the_asked_sentence():
    pairs = grammar.contrast_pairs("mood", Random(3), 20, sentences=9)
    assert {len(sentences_of(text)) for pair in pairs for text in pair} == {9}
    assert len(pairs) == len(set(pairs)) == 20


@pytest.mark.slow
def test_wrong_requests_say_what_is_expected():
    with pytest.raises(ValueError, match=r"expected an attribute out of .*Received 'weather'"):
        grammar.generate_story(Random(0), weather="rain")
    with pytest.raises(ValueError, match=r"expected mood to be 'happy' or 'sad'.*'angry'"):
        grammar.generate_story(Random(0), mood="angry")
    with pytest.raises(ValueError, match=r"expected an attribute out of .*Received 'weather'"):
        grammar.classify("Lily", "weather")
    with pytest.raises(ValueError, match=r"expected sentences >= 1.*sentences=0"):
        grammar.contrast_pairs("mood", Random(0), 1, sentences=0)


@pytest.mark.parametrize("name", MODELS)
def test_bundled_model_matches_its_checksums(name):
    folder = ROOT / "models" / name
    listed = {}
    for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, path = line.split("  ", 1)
        listed[path] = digest
    present = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    }
    assert listed == present


@pytest.mark.parametrize("name", MODELS)
def test_bundled_model_is_small_and_has_a_card(name):
    folder = ROOT / "models" / name
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 8 * 2**20
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {name}\n")
    for heading in ("## Data", "## Recipe", "## Measurements", "## Samples", "Apache-2.0"):
        assert heading in card
    assert {"model.weights.h5", "config.json", "task.json", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
