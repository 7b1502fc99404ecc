"""What is good: the tasks that a policy is trained and evaluated on, each with the one grader that serves both.

A task makes problems of two splits that share no solution, and grades the text of a completion into a reward by parts
and into right or wrong. The text is a model's and so hostile: it is parsed in bounded time and memory, and executed
only where it is a program, in a sandbox; no text makes a grader raise. Nothing here knows tensors or Ray.
"""

from rewards.answers import last_answer
from rewards.arithmetic import Evaluation, evaluate
from rewards.countdown import Countdown, CountdownConfig
from rewards.grader import Grader, RewardConfig
from rewards.gsm8k import Gsm8k, Gsm8kConfig
from rewards.humaneval import HumanEval, HumanEvalConfig
from rewards.jsonl import Jsonl, JsonlConfig
from rewards.kodcode import Kodcode, KodcodeConfig
from rewards.math500 import Math500, Math500Config
from rewards.mbpp import Mbpp, MbppConfig
from rewards.problem import Grade, Message, Outcome, Problem, Split, Task
from rewards.prompts import PromptStyle
from rewards.sample import Sample
from rewards.split import is_heldout
from rewards.sudoku import Sudoku, SudokuConfig
from rewards.sums import Sums, SumsConfig
from rewards.tasks import TaskConfig, make_task
from rewards.term import RewardUnavailableError

__all__ = [
    "Countdown",
    "CountdownConfig",
    "Evaluation",
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
