"""Mathematical equivalence of answers, decided by Math-Verify in a worker process that can be killed."""

from rewards.maths.correctness import final_term, judge_answer
from rewards.maths.spelling import normalized_latex, same_spelling
from rewards.maths.verifier import AnswerVerdict, Limits, MathVerifier

__all__ = ["AnswerVerdict", "Limits", "MathVerifier", "final_term", "judge_answer", "normalized_latex", "same_spelling"]
