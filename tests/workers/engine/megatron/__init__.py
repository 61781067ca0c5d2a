"""megatron-core warns when it is imported (of apex, TransformerEngine and others that it does
without), and warnings are errors in tests: it is imported here first."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.transformer.moe.moe_layer  # noqa: F401
