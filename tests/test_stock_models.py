"""Stock models need no preparation: the same bits at every budget, and an exact floor."""

import pytest
import torch

from tests.morekinds.program import hold
from tests.morekinds.stock import STOCK, stock

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")
@pytest.mark.parametrize("name", STOCK)
def test_a_stock_model_keeps_its_bits(name: str) -> None:
    torch._dynamo.reset()
    hold(stock(name))
