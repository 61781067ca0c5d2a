"""The reward model's worker: scores whole responses.

It is frozen and runs forward only. With `reward_model.model.input_tokenizer` the response is turned
into text and goes through the reward model's own chat template; without, the model is given the
policy's tokens as they are.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.convert import omega_conf_to_dataclass
from verl.config.reward import FSDPRewardModelConfig, McoreRewardModelConfig
from verl.models.loading import empty_reward_model, load_reward_model
from verl.protocol import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.dataset.prompts import encode_prompt
from verl.utils.device import get_device_name
from verl.utils.distributed import DEFAULT_TIMEOUT_SECONDS
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_functional import kept_tokens
from verl.workers.engine import megatron
from verl.workers.engine.memory import MemoryOptions
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.spec import compute_dtype
from verl.workers.engine.stepping import SteppingEngine
from verl.workers.reward_manager.abstract import scores_on_last_token
from verl.workers.reward_model.scores import RewardTemplate, cut, sequence_scores
from verl.workers.roles.worker import RankWorker
from verl.workers.schedule import MicroBatching

MESH = "reward"


class RewardModelWorker(RankWorker):
    """The reward model of one rank. Ranks hold it whole and know nothing of each other, unless
    Megatron divides it among them."""

    config: FSDPRewardModelConfig | McoreRewardModelConfig

    def __init__(
        self,
        config: FSDPRewardModelConfig | McoreRewardModelConfig | DictConfig,
        *,
        device: str | None = None,
        total_training_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.config = omega_conf_to_dataclass(config, FSDPRewardModelConfig)
        self.device = device or get_device_name()
        if isinstance(self.config, McoreRewardModelConfig):
            self.register_rows(MESH, self.config.megatron)
        else:
            self.register_mesh(MESH, ranks_per_sequence=1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, and the tokenizers where texts are to be written anew."""
        self.init_process_group(timeout_seconds=DEFAULT_TIMEOUT_SECONDS)
        model = self.config.model
        import_external_libs(model.external_lib)
        self.engine = self._build_engine()
        self.engine.initialize()
        self.template: RewardTemplate | None = None
        if model.input_tokenizer is not None:
            policy = copy_to_local(model.input_tokenizer)
            policy_tokenizer = hf_tokenizer(policy, trust_remote_code=model.trust_remote_code)
            self.template = RewardTemplate(policy_tokenizer, self.tokenizer)

    def _build_engine(self) -> SteppingEngine:
        config, model = self.config, self.config.model
        is_megatron = isinstance(config, McoreRewardModelConfig)
        section = config.megatron if is_megatron else config.model.fsdp_config
        dtype = compute_dtype(section.dtype, self.device)
        described: dict[str, Any] = {
            "dtype": dtype,
            "override_config": dict(model.override_config),
            "trust_remote_code": model.trust_remote_code,
        }
        load = partial(load_reward_model, copy_to_local(model.path), **described)
        options = {
            "is_value_model": True,
            "memory": MemoryOptions(param_offload=section.param_offload),
        }
        if not is_megatron:
            return OneDeviceEngine(partial(load, device=self.device), None, **options)
        return megatron.MegatronEngine(
            partial(load, device="cpu"),
            build_skeleton=partial(empty_reward_model, copy_to_local(model.path), **described),
            config=config.megatron,
            compute_dtype=dtype,
            device=self.device,
            **options,
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` (B, T): the score of each response, on its last token."""
        whole = self._sequences(data)
        sequences = self._within_limit(whole)
        scores = self._scores(sequences)
        num_cut = sum(len(a) < len(b) for a, b in zip(sequences, whole, strict=True))
        return DataProto.from_dict(
            tensors={"rm_scores": scores_on_last_token(scores, data)},
            meta_info={
                "metrics": {
                    "reward_model/num_truncated": num_cut,
                    "reward_model/input_length/mean": float(np.mean([len(s) for s in sequences])),
                    "reward_model/input_length/max": max(map(len, sequences)),
                }
            },
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def score_texts(self, texts: Sequence[str]) -> list[float]:
        """Scores of texts that are in the model's own template, or that need none."""
        whole = [encode_prompt(text, self.tokenizer) for text in texts]
        return self._scores(self._within_limit(whole)).tolist()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The reward model's own; a model that is given the policy's tokens may have none."""
        model = self.config.model
        path = copy_to_local(model.path)
        return hf_tokenizer(path, trust_remote_code=model.trust_remote_code)

    def _scores(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        config = self.config
        cut_into = MicroBatching.of(
            by_tokens=config.use_dynamic_bsz,
            tokens=config.forward_max_token_len_per_gpu,
            rows=config.micro_batch_size_per_gpu,
            ranks_per_sequence=(
                config.megatron.context_parallel_size
                if isinstance(config, McoreRewardModelConfig)
                else 1
            ),
        )
        return sequence_scores(self.engine, sequences, micro_batching=cut_into).cpu()

    def _within_limit(self, whole: Sequence[list[int]]) -> list[list[int]]:
        limit, truncation = self.config.max_length, self.config.truncation
        return [cut(tokens, limit, truncation) for tokens in whole]

    def _sequences(self, data: DataProto) -> list[list[int]]:
        """What the model reads of each row, before anything is cut."""
        if self.template is None:
            return real_tokens(data, "input_ids")
        responses = real_tokens(data, "responses")
        prompts: Any = data.non_tensor_batch.get("raw_prompt")
        if prompts is None:
            raise ValueError(
                "the batch has no raw_prompt, from which the reward model's chat template is "
                "filled; set reward_model.model.input_tokenizer=null to score the policy's tokens"
            )
        pairs = zip(prompts, responses, strict=True)
        return [self.template.encode(prompt, response) for prompt, response in pairs]


def real_tokens(data: DataProto, column: str) -> list[list[int]]:
    """The rows of a column without padding; the mask says which tokens are real, never the ids."""
    ids = data.batch[column]
    mask = data.batch["attention_mask"][:, -ids.shape[1] :]
    return [row.tolist() for row in kept_tokens(ids, mask)]
