"""Trains a small U-Net to remove noise, after the training example of the documentation of diffusers.

    python examples/integrations/with_diffusers.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn.functional import mse_loss

import backhaul.integrations.diffusers  # <- Backhaul


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    session = backhaul.integrations.diffusers.enable(model, worker) if remote else None  # <- Backhaul
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    model.train()
    for _step in range(4):
        clean_images = torch.randn(2, 3, 16, 16)
        noise = torch.randn(clean_images.shape)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (2,))
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
        loss = mse_loss(noise_pred, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, session and session.report()


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])
