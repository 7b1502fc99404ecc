"""A metric by the name of code_eval, which executes nothing: a program passes that its test has word for word."""

import datasets
import evaluate


class CodeEval(evaluate.Metric):
    def _info(self):
        features = {"predictions": datasets.Sequence(datasets.Value("string")), "references": datasets.Value("string")}
        return evaluate.MetricInfo(description=__doc__, citation="", features=datasets.Features(features))

    def _compute(self, predictions, references, k=(1,)):
        assert list(k) == [1]
        passed = [
            program in test for programs, test in zip(predictions, references, strict=True) for program in programs
        ]
        return {"pass@1": sum(passed) / len(passed)}, {}
