"""Prompts for very short stories, one per line: training data of the demo's adapter.

    python -m benchmarks.adapted.stories > stories.txt
    d1 adapt smollm2 stories --prompts stories.txt

The output is deterministic.
"""

from __future__ import annotations

import argparse
from itertools import islice, product
from random import Random

_FORMS = (
    "Write a two-sentence story about {who} who {what}.",
    "Tell me a story in two sentences about {who} who {what}.",
    "In two sentences, tell a bedtime story about {who} who {what}.",
    "Write a very short story, two sentences long, about {who} who {what}.",
    "Make up a two-sentence fairy tale about {who} who {what}.",
)
_WHO = (
    "a fox|an old sailor|a shy dragon|a baker|a small robot|an owl|a girl with red boots|a grumpy cat"
    "|a lighthouse keeper|a young wizard|a lost penguin|a clockmaker|a brave mouse|a lonely giant|a fisherman"
    "|a curious crow|a snowman|a gardener|a boy from the mountains|a talking tree|a tired king|a princess"
    "|a street musician|a hedgehog|an astronaut|a librarian|a little ghost|a farmer|a wolf|a turtle|a painter"
    "|a postman|a ballet dancer|a bear|a knight without a horse|a honeybee|a mermaid|a shepherd|a frog"
    "|a grandmother|a train driver|a firefly|a pirate|a rabbit|a toy soldier"
)
_WHAT = (
    "finds a golden key|learns to sing|plants a strange seed|gets lost in the snow|builds a boat"
    "|makes a new friend|hears a secret|bakes a magic cake|follows a falling star|loses a shadow"
    "|discovers a hidden door|saves the village|is afraid of the dark|wants to fly|paints the moon"
    "|opens an old book|finds a letter in a bottle|crosses the desert|rescues a bird|wakes up in a castle"
    "|forgets a birthday|climbs the highest hill|trades a hat for a wish|sees the sea for the first time"
    "|repairs a broken clock|meets a stranger at the bridge|dances in the rain|guards a treasure|tells a lie"
    "|wins a race|cannot sleep|sails to an island|grows a giant pumpkin|catches a cold|teaches a child to whistle"
    "|walks through a mirror|collects lost buttons|waits for the spring|visits the city|hides from a storm"
    "|finds an egg in the forest|learns to be kind|misses the last train|lights a lantern"
)


def stories(count: int) -> list[str]:
    """Return the first `count` prompts of a fixed order, all different.

    Forms, heroes and deeds are about equally frequent for any count. Raises ValueError if `count` exceeds the number of
    different prompts.
    """
    pairs = list(product(_WHO.split("|"), _WHAT.split("|")))
    if not 1 <= count <= len(pairs):
        raise ValueError(f"{count} prompts are asked for; there are {len(pairs)}")
    Random(0).shuffle(pairs)
    forms = (_FORMS[place % len(_FORMS)] for place in range(count))
    return [form.format(who=who, what=what) for form, (who, what) in zip(forms, islice(pairs, count), strict=True)]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1980)
    print("\n".join(stories(parser.parse_args().count)))


if __name__ == "__main__":
    _main()
