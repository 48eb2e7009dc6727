"""llama.cpp answering questions about one GGUF file, a JSON object a line.

Other scripts here run it under a Python that has llama-cpp-python.

    {"do": "tokens", "text": …, "special": false}   ids of a text
    {"do": "greedy", "ids": […], "n": 20}           the likeliest continuation, with the gap between two logits
    {"do": "logits", "ids": […]}                    logits after the last
"""

import json
import sys

import numpy as np
from llama_cpp import Llama

path, n_ctx = sys.argv[1], int(sys.argv[2])
model = Llama(model_path=path, n_ctx=n_ctx, n_threads=int(sys.argv[3]), logits_all=True, verbose=False)


def last(ids: list[int]) -> np.ndarray:
    return np.array(model.scores[len(ids) - 1], dtype=np.float64)


for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "tokens":
        data = asked["text"].encode("utf-8")
        answer = model.tokenize(data, add_bos=asked.get("bos", False), special=asked.get("special", False))
    else:
        model.reset()
        ids = list(asked["ids"])
        model.eval(ids)
        if asked["do"] == "logits":
            answer = last(ids).tolist()
        else:
            answer = []
            for _ in range(asked["n"]):
                logits = last(ids)
                best = int(logits.argmax())
                gap = float(logits[best] - np.partition(logits, -2)[-2])
                answer.append([best, gap])
                ids.append(best)
                model.eval([best])
    print(json.dumps(answer), flush=True)
