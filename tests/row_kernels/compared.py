"""Packed rows of a Qwen3-Next whose kernels keep rows apart by their boundaries, against single rows."""

import test_isolation
from test_mixing_modules import Engine, of

from zerolora.train.attention import lengths
from zerolora.train.isolation import check_length, isolate

model = of("qwen3_next", "flash")
base, engine = model.get_base_model(), Engine(model)
found = isolate(engine, base, test_isolation.CPU)
boundaries = lengths.boundaries
check_length(model, base.config, test_isolation.CPU, 50, packing=True)
samples = test_isolation.rows(9, 14, 5, 21, 7, 3)
packed = [samples[:2], samples[2:5], samples[5:]]  # of three lengths: two are padded
together = test_isolation.loss_and_gradients(model.train(), [packed], packing=True)
lengths.boundaries = False
alone = test_isolation.loss_and_gradients(model, [[[row]] for row in samples], packing=False)
difference = sum((together[2][name] - each).square().sum() for name, each in alone[2].items()) ** 0.5
whole = sum(each.square().sum() for each in alone[2].values()) ** 0.5
same = float(difference / whole) <= 1e-6, abs(together[0] - alone[0]) <= 1e-5 * alone[0]
print(found, engine.gathered, boundaries, *same)
