"""Tasks and verifiable rewards: problems, graders and reward terms, for training and evaluation.

A task generates or loads the problems of its splits. Its single grader turns the text of a completion into a reward by
parts and a correctness flag, for both training and evaluation. Completions are untrusted: they are parsed in bounded
time and memory, and only programs are executed, in a sandbox. No text makes a grader raise. Nothing here depends on
tensors or Ray.
"""

from rewards.data.prompts import PromptStyle
from rewards.data.split import is_heldout
from rewards.grader import Grader, RewardConfig
from rewards.parsing.answers import last_answer
from rewards.parsing.arithmetic import EvaluatedExpression, evaluate
from rewards.problem import Grade, Message, Outcome, Problem, Split, Task
from rewards.sample import Sample
from rewards.tasks.countdown import Countdown, CountdownConfig
from rewards.tasks.gsm8k import Gsm8k, Gsm8kConfig
from rewards.tasks.humaneval import HumanEval, HumanEvalConfig
from rewards.tasks.jsonl import Jsonl, JsonlConfig
from rewards.tasks.kodcode import Kodcode, KodcodeConfig
from rewards.tasks.math500 import Math500, Math500Config
from rewards.tasks.mbpp import Mbpp, MbppConfig
from rewards.tasks.registry import TaskConfig, make_task
from rewards.tasks.sudoku import Sudoku, SudokuConfig
from rewards.tasks.sums import Sums, SumsConfig
from rewards.terms.term import RewardUnavailableError

__all__ = [
    "Countdown",
    "CountdownConfig",
    "EvaluatedExpression",
    "Grade",
    "Grader",
    "Gsm8k",
    "Gsm8kConfig",
    "HumanEval",
    "HumanEvalConfig",
    "Jsonl",
    "JsonlConfig",
    "Kodcode",
    "KodcodeConfig",
    "Math500",
    "Math500Config",
    "Mbpp",
    "MbppConfig",
    "Message",
    "Outcome",
    "Problem",
    "PromptStyle",
    "RewardConfig",
    "RewardUnavailableError",
    "Sample",
    "Split",
    "Sudoku",
    "SudokuConfig",
    "Sums",
    "SumsConfig",
    "Task",
    "TaskConfig",
    "evaluate",
    "is_heldout",
    "last_answer",
    "make_task",
]
