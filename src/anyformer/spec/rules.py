"""What must hold between fields. Each rule reads the values it needs and yields the problems it finds.

The same rules judge a recipe (in which some values may be broken, and are then unknown) and a finished specification.
"""

from anyformer.spec.reader import Reader, Rule, apply, check, divisors
from anyformer.spec.rules_attention import ATTENTION_RULES
from anyformer.spec.rules_block import WHOLE_BLOCK_RULES
from anyformer.spec.rules_model import MODEL_RULES

BLOCK_RULES: tuple[Rule, ...] = (*ATTENTION_RULES, *WHOLE_BLOCK_RULES)

__all__ = ["BLOCK_RULES", "MODEL_RULES", "Reader", "apply", "check", "divisors"]
