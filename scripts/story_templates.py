"""The words and sentence templates of the story grammar; `story_grammar` says how they are read."""

from __future__ import annotations

ATTRIBUTES: dict[str, tuple[str, str]] = {
    "mood": ("happy", "sad"),
    "place": ("indoors", "outdoors"),
    "characters": ("one", "two"),
    "time": ("day", "night"),
    "pet": ("dog", "cat"),
}

NAMES: dict[str, tuple[str, ...]] = {
    "girl": ("Lily", "Mia", "Anna", "Emma", "Sara", "Lucy", "Zoe", "Ella"),
    "boy": ("Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Tim", "Finn"),
}
COLOURS = ("red", "blue", "green", "yellow", "pink", "purple", "brown", "white")
THINGS = ("ball", "book", "drum", "hat", "cup", "car", "doll", "box", "bell", "truck")

# Words that follow the first child's gender.
GENDERED: dict[str, dict[str, str]] = {
    "girl": {"girl": "girl", "she": "she", "She": "She", "her": "her", "herself": "herself"},
    "boy": {"girl": "boy", "she": "he", "She": "He", "her": "his", "herself": "himself"},
}

# slot: (attribute, ((words for its first value), (words for its second value))). The words of a
# pair are counterparts, and every filler of a slot has the same number of words.
FILLERS: dict[str, tuple[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "feel": (
        "mood",
        (
            ("happy", "glad", "cheerful", "joyful", "merry"),
            ("sad", "gloomy", "unhappy", "miserable", "upset"),
        ),
    ),
    "adv": (
        "mood",
        (
            ("happily", "gladly", "cheerfully", "joyfully", "merrily"),
            ("sadly", "gloomily", "unhappily", "miserably", "tearfully"),
        ),
    ),
    "room": (
        "place",
        (
            ("kitchen", "bedroom", "attic", "hall", "playroom"),
            ("park", "garden", "forest", "meadow", "field"),
        ),
    ),
    "spot": (
        "place",
        (
            ("on the carpet", "by the sofa", "under the table", "near the lamp"),
            ("on the grass", "by the pond", "under the tree", "near the bush"),
        ),
    ),
    "light": ("time", (("sunlight", "daylight"), ("moonlight", "starlight"))),
    "pet": ("pet", (("dog", "puppy"), ("cat", "kitten"))),
}
# Drawn once a story, so that later sentences have to recall them; the rest once a sentence.
STORY_FILLERS = ("room", "pet")
SENTENCE_FILLERS = ("feel", "adv", "spot", "light")

# (part of the story, attribute): templates. Neutral parts have the attribute "".
TEMPLATES: dict[tuple[str, str], tuple[str, ...]] = {
    ("opening", ""): (
        "Once upon a time there was a {girl} named {A}.",
        "There once was a {girl} named {A}.",
        "This is a story about a {girl} named {A}.",
        "Long ago there lived a {girl} named {A}.",
    ),
    ("possession", ""): (
        "{A} had a {thing_a}.",
        "{She} had a {thing_a}.",
        "{A} always carried a {thing_a}.",
        "{She} owned a {thing_a}.",
    ),
    ("setup", "mood"): (
        "{A} was a very {feel} {girl}.",
        "{A} felt {feel} and [sang a song|wiped away a tear].",
        "Everything was going [well|wrong] for {A}.",
        "{A} [smiled and laughed|frowned and cried] because {she} felt {feel}.",
        "{A} looked {feel} and {her} eyes were full of [joy|tears].",
    ),
    ("setup", "place"): (
        "{A} was in the {room}.",
        "{A} went into the {room} and sat {spot}.",
        "{A} was playing in the {room} with the {thing_a}.",
        "{A} liked to sit {spot} in the {room}.",
    ),
    ("setup", "time"): (
        "It was a [sunny day|dark night].",
        "The [sun|moon] was up in the sky.",
        "It was almost [noon|midnight].",
        "The {light} fell on {A}.",
        "It was a fine [morning|evening] with a lot of {light}.",
    ),
    ("setup", "characters"): (
        "{A} was [all alone|with a friend named {B}].",
        "{A} had [come alone|a friend named {B}].",
        "{A} was there [all by {herself}|with a friend named {B}].",
        "[Nobody came to play with {A}|A friend named {B} came to play with {A}].",
    ),
    ("friend", "characters"): (
        "[Nobody else was there|{B} had a {thing_b}].",
        "[There was nobody else|{B} always carried a {thing_b}].",
        "[{A} played without anyone|{B} owned a {thing_b}].",
    ),
    ("setup", "pet"): (
        "{A} had a little {pet}.",
        "{A} came with a little {pet}.",
        "A little {pet} lived with {A}.",
        "A little {pet} followed {A}.",
    ),
    ("body", "mood"): (
        "{A} {adv} hugged the {thing_a}.",
        "{A} [laughed|cried] and looked at the {thing_a}.",
        "{A} looked at the {thing_a} and felt {feel}.",
        "{A} said that {she} was very {feel}.",
        "{A} saw that the {thing_a} was [clean and shiny|broken and dirty].",
        "{A} [smiled|frowned] at the {thing_a}.",
        "A [sweet|bitter] thought made {A} {feel}.",
    ),
    ("body", "place"): (
        "{A} {adv} carried the {thing_a} around the {room}.",
        "{A} {adv} put the {thing_a} {spot}.",
        "{A} {adv} dropped the {thing_a} {spot}.",
        "{A} looked {adv} around the {room} and sat {spot}.",
        "{A} {adv} walked across the {room}.",
    ),
    ("body", "time"): (
        "{A} {adv} looked up at the [sun|moon].",
        "{A} {adv} watched the [sunbeams|stars].",
        "{A} {adv} held the {thing_a} up in the {light}.",
        "{A} [blinked|yawned] {adv} in the {light}.",
        "The [sun|moon] shone down on the {thing_a}.",
    ),
    ("body", "characters"): (
        "{A} [{adv} played a game alone|and {B} {adv} played a game together].",
        "[{A} had only the {thing_a} to play with|{B} {adv} showed {A} the {thing_b}].",
        "{A} [talked {adv} to {herself}|and {B} talked {adv} to each other].",
        "[All by {herself}, {A} {adv} held the {thing_a}|"
        "Side by side, {A} held the {thing_a} and {B} held the {thing_b}].",
        "[Nobody asked {A} for the {thing_a}|{A} asked {her} friend {B} for the {thing_b}].",
    ),
    ("body", "pet"): (
        "The {pet} {adv} ran to {A}.",
        "{A} {adv} petted the {pet}.",
        "The {pet} [barked|meowed] {adv}.",
        "The {pet} [wagged its tail|licked its paws] and looked {feel}.",
        "The {pet} {adv} sniffed the {thing_a}.",
    ),
    ("ending", "characters"): (
        "In the end [{A} sat alone with the {thing_a}|"
        "{A} and {B} sat together with the {thing_a} and the {thing_b}].",
        "In the end {A} [{adv} rested alone|and {B} {adv} rested together] in the {room}.",
        "In the end {A} [put away the {thing_a} alone|"
        "put away the {thing_a} and {her} friend {B} put away the {thing_b}].",
    ),
    ("ending", "mood"): (
        "At last {A} [found|lost] the {thing_a} and felt {feel}.",
        "So {A} and the {pet} felt {feel} in the {light}.",
        "So {A} held the {thing_a} and [smiled|cried] in the {room}.",
        "At last {A} {adv} took the {thing_a} and called the {pet}.",
    ),
}
