"""The keyboard model, its clients and its metrics, slowly: float64, one token at a time, as the formulas read."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sentence_scores(params, tokens, cell):
    """Logits after each token of one sentence."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    hidden = p["recurrent_kernel"].shape[0]
    h, c, out = np.zeros(hidden), np.zeros(hidden), []
    for token in tokens:
        z = p["embedding"][token] @ p["input_kernel"] + h @ p["recurrent_kernel"] + p["bias"]
        if cell == "cifg":
            f, g, o = np.split(z, 3)
            f = sigmoid(f + 1)
            c = f * c + (1 - f) * np.tanh(g)
        else:
            i, f, g, o = np.split(z, 4)
            c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        y = h @ p["projection"] + p["projection_bias"]
        out.append(p.get("output_embedding", p["embedding"]) @ y + p["output_bias"])
    return np.array(out)


def log_softmax(scores):
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def batch_loss(params, sentences, cell):
    """Mean cross entropy over the targets that are not padding."""
    nats = []
    for row in sentences:
        log_prob = log_softmax(sentence_scores(params, row[:-1], cell))
        nats += [-log_prob[t, word] for t, word in enumerate(row[1:]) if word != 0]
    return float(np.mean(nats)) if nats else 0.0


def evaluation(params, sentences, cell, num_words):
    """(top-1 words, top-3 words, accuracy over the whole layer, perplexity), as definitions read."""
    nats, top1, top3, tff = [], [], [], []
    for row in sentences:
        for scores, word in zip(sentence_scores(params, row[:-1], cell), row[1:], strict=True):
            if word == 0:
                continue
            nats.append(-log_softmax(scores)[word])
            if 1 <= word <= num_words:
                offered = 1 + np.argsort(-scores[1 : num_words + 1], kind="stable")
                top1.append(word == offered[0])
                top3.append(word in offered[:3])
                tff.append(word == np.argmax(scores))
    return 100 * np.mean(top1), 100 * np.mean(top3), 100 * np.mean(tff), float(np.exp(np.mean(nats)))
