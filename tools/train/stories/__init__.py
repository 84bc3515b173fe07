"""Templates of word problems by subject. Importing this registers all of them."""

from tools.train.stories import chains, counting, money, rates, unseen

__all__ = ["chains", "counting", "money", "rates", "unseen"]
