"""Where weights lie: moved, equal, behind each other, and still one where a model uses them twice."""

import torch

from kernels.cpu.huge_pages import HUGE_PAGE_BYTES, empty_in_huge_pages, gather_in_huge_pages


def test_a_region_begins_at_a_huge_page():
    region = empty_in_huge_pages(3_000_001)
    assert region.shape == (3_000_001,)
    assert region.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not region.any()


def test_gathered_parameters_keep_their_values_and_lie_in_order():
    values = [torch.randn(5, 7), torch.randn(33).bfloat16(), torch.randn(64, 3)]
    module = torch.nn.ParameterList([torch.nn.Parameter(value.clone()) for value in values])
    gather_in_huge_pages(list(module))
    assert all(torch.equal(parameter, value) for parameter, value in zip(module, values, strict=True))
    begins = [parameter.data_ptr() for parameter in module]
    assert [begin - begins[0] for begin in begins] == [0, 192, 320]


def test_tied_weights_stay_one():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    gather_in_huge_pages(list(model.parameters()))
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()
