"""Mathematical equivalence of answers, decided by Math-Verify in a worker process that can be killed."""

from rewards.maths.correctness import judge_answer, final_term
from rewards.maths.spelling import normalized_latex, same_spelling
from rewards.maths.verifier import Limits, MathVerifier, AnswerVerdict

__all__ = ["Limits", "MathVerifier", "Verdict", "answers", "final_term", "respelled", "spelled_alike"]
