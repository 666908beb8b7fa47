"""The built-in rewards, against the points that their keys name."""

import math
from fractions import Fraction

import pytest

from maxtext import rewards
from maxtext.common.errors import ConfigError
from maxtext.trainers.methods.rl.rewards.answers import accepted_answers, last_boxed
from maxtext.trainers.methods.rl.rewards.equality import normalize
from maxtext.trainers.methods.rl.rewards.grading import MathVerifier, number_ratio

REASONED = "<reasoning>so</reasoning><answer>{}</answer>"
EXACT, WHITE_SPACE, HIGH, LOW, WRONG, UNREADABLE = 5.0, 1.5, 0.5, 0.25, -1.0, -0.5


def answer_reward(completion, answer, **keys):
    return rewards.score([completion], [answer], **keys)["answer"][0]


@pytest.mark.parametrize(
    ("completion", "exact", "parts"),
    [
        (REASONED.format(42), 3.0, 2.0),
        ("first\n<reasoning>a\nb</reasoning>\n<answer>4\n2</answer> after", 3.0, 2.0),
        ("<answer>42</answer>", 0.0, 2 * 0.5 - 2 * 0.5),
        ("<answer>1</answer><reasoning>so</reasoning>", 0.0, 2.0),
        ("<reasoning>so</reasoning><answer></answer>", 0.0, 2.0),
        ("<reasoning><reasoning>so</reasoning><answer>1</answer>", 3.0, 3 * 0.5 - 0.5),
        ("42", 0.0, -2.0),
    ],
)
def test_points_for_the_format(completion, exact, parts):
    scores = rewards.score([completion], ["42"])
    assert scores["format_exact"] == [exact]
    assert scores["format_parts"] == [parts]


def test_a_prompt_that_ends_with_the_start_of_the_reasoning():
    completion = "so</reasoning><answer>42</answer>"
    keys = {"reasoning_start_token_in_prompt": True}
    scores = rewards.score([completion, REASONED.format(42)], ["42", "42"], **keys)
    assert scores["format_exact"] == [3.0, 3.0]
    assert scores["format_parts"] == [2.0, 3 * 0.5 - 0.5]  # the second has the token twice
    assert rewards.score([completion], ["42"])["format_exact"] == [0.0]
    assert rewards.grade([completion], ["42"], **keys) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("guess", "answer", "points"),
    [
        ("42", "42", EXACT),
        (" 42 ", "42", WHITE_SPACE),
        ("42.0", "42", EXACT),
        ("1,000", "1000", EXACT),
        ("40", "42", HIGH),
        ("37.8", "42", HIGH),  # 0.9
        ("35", "42", LOW),
        ("50.4", "42", LOW),  # 1.2
        ("7", "42", WRONG),
        ("-42", "42", WRONG),
        ("0.1", "0", WRONG),
        ("42", "a long way #### 42", EXACT),
        ("42", ["41", "42"], EXACT),
        ("42", '["41", "42"]', EXACT),
        ("B", "(B) 42", EXACT),
        ("42", "(B) 42", EXACT),
        ("(B) 42", "B", EXACT),
        ("B. 42", "B", EXACT),
        ("42", [], WRONG),
        ("42", "[]", WRONG),
        ("so \\boxed{1} or \\boxed{42}", "42", EXACT),
    ],
)
def test_points_of_answers_without_mathematics(guess, answer, points):
    assert answer_reward(REASONED.format(guess), answer) == points


@pytest.mark.parametrize(
    ("guess", "answer", "ratio"),
    [
        ("0.33", "1/3", Fraction(99, 100)),
        ("\\frac{3}{4}", "0.7", Fraction(15, 14)),
        ("-\\frac12", "-0.5", 1),
        ("2 1/3", "7/3", 1),
        ("-2 1/4", "-2.5", Fraction(9, 10)),
        ("4.9 million", "5,000,000", Fraction(98, 100)),
        ("48\\%", "50%", Fraction(96, 100)),
        ("1/0", "1", None),
        ("x", "1", None),
        ("1", "0", None),
    ],
)
def test_ratio_of_numbers_in_any_spelling(guess, answer, ratio):
    assert number_ratio(guess, answer) == ratio


def test_answer_is_read_from_the_last_solution():
    assert answer_reward("<answer>1</answer> no, <answer>42</answer>", "42") == EXACT
    assert answer_reward("<answer>1 <answer>42</answer>", "42") == EXACT
    assert answer_reward("it is \\boxed{42}", "42") == EXACT  # without a solution
    assert answer_reward("<answer> </answer>", "42") == UNREADABLE
    assert answer_reward("42", "42") == UNREADABLE


def test_boxed_answers_have_balanced_braces():
    assert last_boxed("\\boxed{\\frac{1}{2}} and") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{1} \\boxed{2") == "1"
    assert last_boxed("none") is None


def test_accepted_answers_of_other_types():
    assert accepted_answers(42) == ("42",)
    assert accepted_answers(None) == ()
    assert answer_reward(REASONED.format("None"), None) == -1.0
    assert accepted_answers("[0, 1)") == ("[0, 1)",)  # an interval, not JSON
    assert accepted_answers([1, "2"]) == ("1", "2")
    assert accepted_answers('["1", "2"]') == ("1", "2")
    assert accepted_answers("[1, 2]") == ("1", "2", "[1, 2]")  # also an interval


def test_points_follow_their_keys():
    keys = dict(reward_exact_answer=7.0, solution_start_token="<a>", solution_end_token="</a>")
    assert answer_reward("<a>42</a>", "42", **keys) == 7.0
    with pytest.raises(ConfigError, match="reward_exakt"):
        rewards.score(["42"], ["42"], reward_exakt=1.0)


@pytest.mark.parametrize(
    ("key", "reward", "completion", "share"),
    [
        ("reward_exact_answer", "answer", "<answer>42</answer>", 1),
        ("reward_white_space_format_match", "answer", "<answer> 42 </answer>", 1),
        ("reward_ratio_guess_to_answer_high", "answer", "<answer>40</answer>", 1),
        ("reward_ratio_guess_to_answer_low", "answer", "<answer>35</answer>", 1),
        ("penalty_incorrect_answer", "answer", "<answer>7</answer>", 1),
        ("penalty_incorrect_format", "answer", "42", 1),
        ("penalty_incorrect_format", "format_parts", "42", 4),
        ("reward_partial_format_match", "format_parts", REASONED.format(42), 4),
        ("reward_exact_format_match", "format_exact", REASONED.format(42), 1),
    ],
)
def test_each_key_is_what_its_completion_gets(key, reward, completion, share):
    assert rewards.score([completion], ["42"], **{key: 0.125})[reward] == [share * 0.125]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("$1,000", "1000"),
        ("(1,000)", "(1,000)"),  # a pair of numbers
        ("5 million dollars", "5 \\cdot 10^{6}"),
        ("12 square feet", "12"),
        ("2 1/3", "(2+\\frac{1}{3})"),
        ("-2\\frac{1}{3}", "-(2+\\frac{1}{3})"),
        ("21/3", "21/3"),
        ("5x", "5x"),
        ("\\text{yes}", "yes"),
        ("**42**", "42"),
        ("5\\,\\text{cm}^2", "5"),
        ("\\mathrm{e}^{2}", "e^2"),
        ("5 m/s", "5"),
        ("$\\frac{1}{2}$ cup", "\\frac{1}{2}"),
        ("1 000 000", "1000000"),
        ("1.5 x 10^3", "1.5 \\times 10^3"),
    ],
)
def test_spellings_of_an_answer(text, expected):
    assert normalize(text) == expected


# With math-verify, whose processes import sympy.


@pytest.fixture(scope="module")
def verifier():
    pytest.importorskip("math_verify")
    verifier = MathVerifier(num_procs=1)
    yield verifier
    verifier.close()


@pytest.mark.slow
def test_answers_are_equal_by_value(verifier):
    equal = [
        ("42", "\\frac{84}{2}"),
        ("\\frac{1}{2}", "0.5"),
        ("7/3", "2 1/3"),
        ("x^2+2x+1", "(x+1)^2"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("5000000", "5 million"),
        ("12", "12 \\text{ cm}"),
    ]
    different = [("42", "forty"), ("x+1", "x+2"), ("(1,2)", "(2,1)"), ("1", "}{ \\frac")]
    assert verifier.equal(equal, 120) == [True] * len(equal)
    assert verifier.equal(different, 120) == [False] * len(different)


@pytest.mark.slow
def test_late_answers_are_not_scored(verifier):
    """A process that has just started is still importing sympy."""
    fresh = MathVerifier(num_procs=1)
    assert fresh.equal([("x", "x+1"), ("x", "2x/2")], timeout=0) == [None, None]
    assert not fresh.idle
    late = answer_reward(
        REASONED.format("2x/2"), "x", math_verify_timeout=0, math_verify_num_procs=3
    )
    assert math.isnan(late)
    # An answer that equals another accepted one is right, whatever the comparison would say.
    keys = dict(math_verify_timeout=0, math_verify_num_procs=3)
    assert answer_reward(REASONED.format("2x/2"), ["x", "2x/2"], **keys) == EXACT
    assert verifier.equal([("1/2", "\\frac{2}{4}")], 120) == [True]
