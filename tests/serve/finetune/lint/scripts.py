"""Training scripts: correct loops, and the same with one mistake each. The faulty line has the comment `# <-`."""

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F

model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8)
"""
RECIPE = (
    HEAD
    + """\
scaler = torch.amp.GradScaler("cuda")
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
            loss = F.cross_entropy(out, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
)
ACCUMULATION = (
    HEAD
    + """\
scaler = torch.amp.GradScaler("cuda")
for step, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y) / 4
    scaler.scale(loss).backward()
    if (step + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
"""
)
TWO_OPTIMIZERS = """\
import torch
from torch import nn

one, two = nn.Linear(8, 4), nn.Linear(8, 4)
optimizer1 = torch.optim.SGD(one.parameters(), lr=0.1)
optimizer2 = torch.optim.SGD(two.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer1.zero_grad()
    optimizer2.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        a, b = one(x), two(x)
        loss1, loss2 = (a + b).square().mean(), (a - b).abs().mean()
    scaler.scale(loss1).backward(retain_graph=True)
    scaler.scale(loss2).backward()
    scaler.unscale_(optimizer1)
    torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
    scaler.step(optimizer1)
    scaler.step(optimizer2)
    scaler.update()
"""
GAN = """\
import torch
from torch import nn

netG, netD = nn.Sequential(nn.Linear(4, 8)), nn.Sequential(nn.Linear(8, 1))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4)
criterion = nn.BCEWithLogitsLoss()
scaler = torch.amp.GradScaler("cuda")
real_label, fake_label = 1.0, 0.0
for real, _ in loader:
    noise = torch.randn(len(real), 4)
    with torch.autocast("cuda", dtype=torch.float16):
        fake = netG(noise)
        output = netD(real)
        errD_real = criterion(output, torch.full_like(output, real_label))
        output = netD(fake.detach())
        errD = errD_real + criterion(output, torch.full_like(output, fake_label))
    optimizerD.zero_grad()
    scaler.scale(errD).backward()
    scaler.step(optimizerD)
    with torch.autocast("cuda", dtype=torch.float16):
        output = netD(fake)
        errG = criterion(output, torch.full_like(output, real_label)) + (fake - fake.detach()).abs().mean()
    optimizerG.zero_grad()
    scaler.scale(errG).backward()
    scaler.step(optimizerG)
    scaler.update()
"""
OPTIONAL_AMP = """\
import argparse
import torch

def train(model, loader, optimizer, scaler=None, clip=None):
    for x, y in loader:
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            loss = model(x, y)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

def main(args):
    model = build(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    for epoch in range(args.epochs):
        train(model, args.loader, optimizer, scaler, args.clip)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if scaler:
            state["scaler"] = scaler.state_dict()
        torch.save(state, args.output)
"""
EARLY_CONTINUE = """\
import torch

def train(model, loader, optimizer, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for x, y in loader:
        loss = model(x, y)
        if not use_amp:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
TESTED_AGAIN = """\
import torch

def train(model, loader, optimizer, fast, clip):
    scaler = torch.amp.GradScaler("cuda", enabled=fast)
    for x, y in loader:
        loss = model(x, y)
        if not fast:
            loss.backward()
        if fast:
            scaler.scale(loss).backward()
        if not fast:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if fast:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
"""
HELPERS = """\
import torch
from helpers import run_backward, finish

def train(model, loader, optimizer, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for x, y in loader:
        loss = model(x, y)
        if use_amp:
            scaler.scale(loss).backward()
            finish(scaler, optimizer)
            continue
        run_backward(loss)
        optimizer.step()

def train_further(model, loader, optimizer):
    inner = torch.amp.GradScaler("cuda")
    for x, y in loader:
        inner.scale(model(x, y)).backward()
        inner.step(optimizer)
        finish(inner)
"""
ONE_AFTER_THE_OTHER = """\
import torch

def train(one, two, loader, optimizer1, optimizer2):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(one(x).mean()).backward()
        scaler.step(optimizer1)
        scaler.update()
        scaler.scale(two(x).mean()).backward()
        scaler.step(optimizer2)
        scaler.update()
"""
ONE_NAME_FOR_TWO = """\
import torch
from sklearn.preprocessing import StandardScaler

def prepared(x):
    scaler = StandardScaler().fit(x)
    return scaler.unscale(scaler.transform(x))

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
"""
DDP = """\
import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self, model, args):
        self.model = DDP(model.to(args.rank), device_ids=[args.rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")

    def step(self, x, y, last):
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = self.model(x, y)
        if not last:
            with self.model.no_sync():
                self.scaler.scale(loss).backward()
            return loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def save(self, path):
        torch.save({"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
"""
FOLDS = """\
import torch
from torch import nn

for fold in range(5):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loaders[fold]:
        with torch.autocast("cuda"):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
FP32_GUARDS = """\
import torch
from torch import nn
import torch.nn.functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8, eps=1e-12)

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        scores = scores.float().masked_fill(mask == 0, -1e9)
        weights = F.softmax(scores, dim=-1)
        entropy = -(weights * torch.log(weights + 1e-12)).sum()
        scale = x / (x.float().norm(dim=-1, keepdim=True) + 1e-8)
        return self.norm(weights @ scale), entropy / (mask.sum() + 1e-8)

model = Attention()
optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
scaler = torch.amp.GradScaler("cuda")
for x, mask in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        out, entropy = model(x, mask)
        safe = out.masked_fill(mask == 0, float("-inf"))
        with torch.autocast("cuda", enabled=False):
            logs = torch.log(torch.sigmoid(out.float()) + 1e-8)
            entropy = entropy + F.binary_cross_entropy(torch.sigmoid(out.float()), mask.float())
        ratio = out.float() / (out.float().std() + 1e-8)
        loss = (safe + logs + ratio).mean() + entropy
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
BF16 = """\
import torch
from torch import nn

model = nn.Linear(8, 8).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for x, mask in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
        loss = torch.log(torch.sigmoid(out.masked_fill(mask, -1e9)) + 1e-8).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
OTHER_SCALERS = """\
import torch
from sklearn.preprocessing import StandardScaler
from accelerate import Accelerator

accelerator, scaler = Accelerator(mixed_precision="fp16"), StandardScaler()
model, optimizer, loader = accelerator.prepare(build(), torch.optim.Adam(net.parameters()), data())
for x, y in loader:
    loss = model(scaler.transform(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scaler.unscale(x)
model.half()
torch.save(model.state_dict(), "half.pt")
"""
BOTH_VERSIONS = """\
import torch
try:
    from torch.amp import GradScaler, autocast
except ImportError:
    from torch.cuda.amp import GradScaler, autocast

model, optimizer, scheduler = build()
scaler = GradScaler()
for x, y in loader:
    with autocast("cuda"):
        loss = model(x, y)
    scaler.scale(loss).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
half = copy.deepcopy(model).half()
"""
CORRECT = {
    "the documented recipe": RECIPE,
    "accumulation": ACCUMULATION,
    "two optimizers": TWO_OPTIMIZERS,
    "a generator and a discriminator": GAN,
    "half precision by an option": OPTIONAL_AMP,
    "a branch that leaves": EARLY_CONTINUE,
    "one test several times": TESTED_AGAIN,
    "helpers of another file": HELPERS,
    "two optimizers, one after the other": ONE_AFTER_THE_OTHER,
    "one name for two scalers": ONE_NAME_FOR_TWO,
    "DDP in a class": DDP,
    "a scaler for each fold": FOLDS,
    "guards and masks in FP32": FP32_GUARDS,
    "bf16 without a scaler": BF16,
    "scalers of other libraries": OTHER_SCALERS,
    "names of two versions": BOTH_VERSIONS,
}


def _changed(script: str, old: str, new: str) -> str:
    assert script.count(old) == 1, (script.count(old), old)
    return script.replace(old, new)


STATE = """\
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")  # <-
optimizer.load_state_dict(torch.load("last.pt")["optimizer"])  # <-
"""
MISTAKES = {
    "amp-backward": _changed(
        "from torch import amp\n" + RECIPE, "scaler.scale(loss).backward()", "amp.backward(loss)  # <-"
    ),
    "scaler-unscale": _changed(RECIPE, "scaler.unscale_(optimizer)", "scaler.unscale(optimizer)  # <-"),
    "scaler-in-loop": _changed(
        _changed(RECIPE, 'scaler = torch.amp.GradScaler("cuda")\n', ""),
        "    for x, y",
        '    scaler = torch.amp.GradScaler("cuda")  # <-\n    for x, y',
    ),
    "unscaled-step": _changed(
        _changed(
            RECIPE,
            "        scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            "",
        ),
        "scaler.step(optimizer)",
        "optimizer.step()  # <-",
    ),
    "missing-update": _changed(
        _changed(RECIPE, "        scaler.update()\n", ""),
        "scaler.step(optimizer)",
        "scaler.step(optimizer)  # <-",
    ),
    "update-between-steps": _changed(
        TWO_OPTIMIZERS, "scaler.step(optimizer1)\n", "scaler.step(optimizer1)\n    scaler.update()  # <-\n"
    ),
    "update-in-window": _changed(
        _changed(
            _changed(ACCUMULATION, "        scaler.update()\n", ""),
            "        scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            "",
        ),
        "        optimizer.zero_grad(set_to_none=True)\n",
        "        optimizer.zero_grad(set_to_none=True)\n    scaler.update()  # <-\n",
    ),
    "clip-before-unscale": _changed(
        _changed(RECIPE, "        scaler.unscale_(optimizer)\n", ""),
        "clip_grad_norm_(model.parameters(), 1.0)",
        "clip_grad_norm_(model.parameters(), 1.0)  # <-",
    ),
    "scaler-not-saved": RECIPE + STATE,
    "deprecated-amp": _changed(
        _changed(
            RECIPE, 'torch.autocast("cuda", dtype=torch.float16)', "autocast(True, torch.float16)"
        ).replace("autocast(True, torch.float16):", "autocast(True, torch.float16):  # <-"),
        "from torch import nn\n",
        "from torch import nn\nfrom torch.cuda.amp import autocast\n",
    ),
    "backward-in-autocast": _changed(
        RECIPE, "        scaler.scale(loss).backward()", "            scaler.scale(loss).backward()  # <-"
    ),
    "banned-loss": _changed(
        RECIPE,
        "F.cross_entropy(out, y)",
        "F.binary_cross_entropy(torch.sigmoid(out), F.one_hot(y, 4).float())  # <-",
    ),
    "detached-generator-loss": _changed(GAN, " + (fake - fake.detach()).abs().mean()", "").replace(
        "output = netD(fake)\n", "output = netD(fake.detach())  # <-\n"
    ),
    "small-guard": _changed(
        RECIPE, "F.cross_entropy(out, y)", "-torch.log(torch.sigmoid(out) + 1e-8).mean()  # <-"
    ),
    "large-mask": _changed(
        RECIPE, "F.cross_entropy(out, y)", "F.cross_entropy(out.masked_fill(out > 9, -1e9), y)  # <-"
    ),
    "half-weights": _changed(RECIPE, "nn.Linear(8, 4).cuda()", "nn.Linear(8, 4).cuda().half()  # <-"),
}
