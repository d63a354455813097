"""Nine conversations of a real chat service: the lengths of their prompts, what they share, and their order.

Source: Mooncake's `FAST25-release/traces/conversation_trace.jsonl` (github.com/kvcache-ai/Mooncake, Apache-2.0; Qin et
al., "Mooncake", FAST 2025). It names every 512 tokens of a request's prompt by a number that counts up as contents come
up for the first time. So one late request of a conversation tells its earlier turns: a jump in its numbers is where a
turn began, the number after the jump says when. Here a turn is (that number, prompt in blocks of 512 tokens); the last
turn's prompt is in tokens. An earlier prompt may have been up to a block longer than the part that the next one shares.
All begin with the same block. What was said is not published: contents here are random.
"""

from __future__ import annotations

import random

BLOCK = 512
CONVERSATIONS: tuple[tuple[tuple[tuple[int, int], ...], tuple[int, int]], ...] = (
    (
        (
            (75436, 28), (80078, 30), (86249, 31), (90713, 32), (99629, 34), (104589, 35), (110720, 36),
            (114410, 38), (121594, 39), (125841, 40), (130656, 42), (135331, 43), (153881, 45),
        ),
        (160296, 24031),
    ),
    (((149110, 117),), (160799, 60536)),
    (((128955, 50),), (160358, 26579)),
    (((80911, 49), (97369, 51)), (99632, 26186)),
    (((74486, 34), (77696, 35), (89382, 37), (97688, 38)), (100450, 20551)),
    (((128413, 13), (133130, 14), (142002, 15), (150379, 34)), (160801, 18473)),
    (((93865, 2), (110755, 3), (120233, 4), (129746, 5), (143304, 6), (148104, 21)), (160629, 28987)),
    (((78891, 2), (98205, 3), (127484, 4), (132093, 5), (136082, 6), (156667, 7)), (160722, 19822)),
    (((53903, 16), (95733, 28)), (100418, 14787)),
)  # fmt: skip


def requests(rng: random.Random, vocab: int) -> list[tuple[int, int, list[int]]]:
    """(conversation, turn, prompt) in the order in which they arrived."""
    shared = [rng.randrange(vocab) for _ in range(BLOCK)]
    arrived = []
    for conversation, (earlier, (last_at, last_tokens)) in enumerate(CONVERSATIONS):
        said = shared + [rng.randrange(vocab) for _ in range(last_tokens - BLOCK)]
        turns = [(at, BLOCK * blocks) for at, blocks in earlier] + [(last_at, last_tokens)]
        arrived += [(at, conversation, turn, said[:tokens]) for turn, (at, tokens) in enumerate(turns)]
    return [each[1:] for each in sorted(arrived)]
