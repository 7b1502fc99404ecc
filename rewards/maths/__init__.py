"""Mathematical equivalence of answers, decided by Math-Verify in a worker process that can be killed."""

from rewards.maths.answering import answers, final_term
from rewards.maths.spelling import respelled, spelled_alike
from rewards.maths.verifier import Limits, MathVerifier, Verdict

__all__ = ["Limits", "MathVerifier", "Verdict", "answers", "final_term", "respelled", "spelled_alike"]
