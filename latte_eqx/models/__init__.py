"""Whole models."""

from latte_eqx.models.classifier import PairClassifier, SequenceClassifier
from latte_eqx.models.config import ModelConfig
from latte_eqx.models.language_model import LanguageModel
from latte_eqx.models.paper import PAPER_ROWS

__all__ = ["PAPER_ROWS", "LanguageModel", "ModelConfig", "PairClassifier", "SequenceClassifier"]
