"""The frozen vision transformer, from the Hugging Face hub or a local folder."""

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedunfold.core.errors import InputError
from fedunfold.core.extras import HUB_ERRORS, import_extra, quiet
from fedunfold.data.npz import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

NEEDS = "image features need transformers and pillow; run: pip install 'fedunfold[vision]'"


@dataclass(frozen=True, eq=False)
class Backbone:
    """A model that is only evaluated.

    Attributes:
        model: The module of transformers.
        processor: What transformers prepares its images with, by pillow and not torchvision.
        digest: SHA-256 of both.
        device: Where it is evaluated.
    """

    model: Any
    processor: Any
    digest: str
    device: torch.device

    @classmethod
    def load(cls, name: str, device: torch.device) -> "Backbone":
        """Load the weights in float32 from safetensors files; code that a repository brings is never run.

        Args:
            name: The model on the hub, or a local folder.
            device: Where to evaluate it.

        Returns:
            The model, ready to be used.

        Raises:
            InputError: It cannot be loaded, or its features would mean nothing.
        """
        import_extra("PIL", NEEDS)
        transformers = import_extra("transformers", NEEDS)
        # Not from the package itself, which has it only where torchvision is installed.
        processors = importlib.import_module("transformers.models.auto.image_processing_auto").AutoImageProcessor
        folder = Path(name).expanduser()
        local = folder.is_dir()
        source = str(folder) if local else name
        try:
            with quiet(transformers):
                # First, because it says most clearly what is wrong with a name or the network.
                transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
                processor = processors.from_pretrained(source, backend="pil", trust_remote_code=False)
                model, loading = transformers.AutoModel.from_pretrained(
                    source,
                    dtype=torch.float32,
                    use_safetensors=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except (*HUB_ERRORS, SafetensorError) as error:
            remedy = (
                "the folder needs config.json, preprocessor_config.json and model.safetensors"
                if local
                else "check the name and the network, or give a local folder with the model"
            )
            raise InputError(f"model {name} cannot be loaded ({first_line(error)}); {remedy}.") from error
        _check(name, model, loading["missing_keys"])
        digest = _digest(model, processor, loading["missing_keys"])
        loaded = cls(model.to(device).eval(), processor, digest, device)
        loaded._check_processor(name)
        return loaded

    def prepare(self, image: "Image") -> NDArray[np.float32]:
        """An RGB image as the model's input, [3, height, width]."""
        pixels: NDArray[np.float32] = self.processor(images=image, return_tensors="np")["pixel_values"][0]
        return pixels

    def _check_processor(self, name: str) -> None:
        """Refuse one that fails, or whose images make no batch."""
        from PIL import Image

        try:
            with np.errstate(all="ignore"):
                made = [self.prepare(Image.new("RGB", size)) for size in ((64, 48), (48, 80))]
        except HUB_ERRORS as error:
            raise InputError(f"model {name}: preprocessor_config.json is wrong ({first_line(error)}).") from error
        if made[0].shape != made[1].shape or not np.isfinite(made[0]).all():
            raise InputError(f"model {name}: preprocessor_config.json gives images of different sizes, or no numbers.")

    def features(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """The CLS token of the last hidden state, [images, D]."""
        try:
            with torch.inference_mode():
                hidden = self.model(pixel_values=torch.from_numpy(pixels).to(self.device)).last_hidden_state
                result: NDArray[np.float32] = hidden[:, 0].float().cpu().numpy()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{len(pixels)} images at once do not fit into the memory of {self.device}; "
                "lower `batch_size` and run it again."
            ) from error
        except ValueError as error:  # such as an image size the model was not made for
            raise InputError(f"the model refuses its input ({first_line(error)}).") from error
        return result


def _check(name: str, model: Any, missing: set[str]) -> None:
    """Refuse what would give features that mean nothing."""
    absent = sorted(key for key in missing if "pooler" not in key)  # the pooler is not used here
    if absent:
        raise InputError(f"model {name} lacks {len(absent)} of its weights, such as {absent[0]}.")
    if not any(key.endswith("cls_token") for key, _ in model.named_parameters()):
        raise InputError(f"model {name} has no CLS token; choose a vision transformer such as ViT or DeiT.")
    if hasattr(model.config, "mask_ratio"):
        raise InputError(f"model {name} masks its input at random; choose one that sees the whole image.")


def _digest(model: Any, processor: Any, missing: set[str]) -> str:
    """SHA-256 of the weights read from file and the preprocessing."""
    content = hashlib.sha256(processor.to_json_string().encode())
    for key, tensor in sorted(model.state_dict().items()):
        if key not in missing:
            content.update(key.encode())
            content.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    return content.hexdigest()
