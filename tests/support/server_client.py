"""What tests of a server ask and check."""

import time

import pytest

from tests.inference.conftest import WORDS

torch = pytest.importorskip("torch")
MESSAGES = [{"role": "user", "content": "w5 w12"}]
EOS = 1


def log_softmax(model, ids):
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def greedy(model, ids, count):
    """(new ids, their log-probabilities), up to the end-of-sequence token."""
    new, logprobs = [], []
    while len(new) < count and EOS not in new:
        last = log_softmax(model, [*ids, *new])[-1]
        new.append(int(last.argmax()))
        logprobs.append(float(last.max()))
    return new, logprobs


def text_of(new):
    return "".join(f" {WORDS[token]}" for token in new if token > EOS)


def check_error(response, status, code=None, param=None):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    return error


def metric(http, name, **labels):
    """The sum of the samples of a metric that have these labels."""
    total = 0.0
    for line in http.get("/metrics").text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == f"maxtext:{name}" and all(
            f'{label}="{text}"' in sample for label, text in labels.items()
        ):
            total += float(value)
    return total


def wait_until_idle(http):
    names = ("num_requests_running", "num_requests_waiting", "kv_pages_in_use")
    end = time.monotonic() + 15
    while any(metric(http, name) for name in names):
        assert time.monotonic() < end, "requests are still running"
        time.sleep(0.05)
