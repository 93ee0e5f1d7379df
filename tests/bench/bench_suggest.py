"""CPU milliseconds a word of suggestions on the paper's model (96 x 670, 10,000 words): three words after each word
typed, and narrowed by each letter; beside computing the whole text again at every word.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from tests.bench.timing import table
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import compose, model
from trainers.keyboard.released import Released
from trainers.keyboard.suggest import Suggester

WORDS, REPEATS = 10_000, 200


def main():
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = dict.fromkeys("".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(2 * WORDS))
    vocabulary = Vocabulary(tuple(words)[:WORDS], "public")
    sizes = model.ModelConfig(num_tokens=vocabulary.size, embedding_size=96, hidden_size=670)
    released = Released(model.init_params(sizes, seed=0), sizes, vocabulary, {}, 0)
    suggester = Suggester(released)
    text = [vocabulary.words[i] for i in rng.integers(0, WORDS, 20)]
    inputs = jnp.array([[vocabulary.bos, *map(vocabulary.id, text)]]).T
    again = jax.jit(lambda tokens: model.logits(released.params, tokens, cell=sizes.cell)[-1])

    def type_word():
        suggester.commit(text[0])
        suggester.suggest()

    def completed(beams):
        compose.complete(released, suggester, threshold=0.5, beams=beams)

    rows = [
        ("a word, three suggestions", _milliseconds(type_word)),
        ("a letter, three suggestions", _milliseconds(lambda: suggester.suggest("th"))),
        (f"a completion of up to {compose.LENGTH} words, greedy", _milliseconds(lambda: completed(1))),
        ("the same with 4 beams", _milliseconds(lambda: completed(4))),
        ("the same word, all 21 words computed again", _milliseconds(lambda: np.asarray(again(inputs)))),
    ]
    table(["what", "CPU ms (median of 200)"], [[name, f"{value:.3f}"] for name, value in rows])


def _milliseconds(work):
    work()
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1e3 * float(np.median(times))
