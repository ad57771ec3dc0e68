# ruff: noqa: E501 (scripts as they are, one a string)
"""Mistakes again, spelt otherwise: through names, attributes, aliases and functions of the same file. `# <-` marks the
line that is named. Every script runs once its advice is followed (on CPU, see running.py)."""

NET = """\
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)
    def forward(self, x):
        return self.body(x)

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
"""
FORWARD = """\
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
"""
LOOP = NET + "for x, y in loader:\n" + FORWARD
STEP = "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"

TRAINER = """\
import torch
from torch import nn
from torch.amp import GradScaler, autocast

class Trainer:
    def __init__(self, model, lr=1e-3):
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scaler = GradScaler("cuda")
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        with autocast("cuda", dtype=torch.float16):
            return self.loss(self.model(x), y)

    def fit(self, loader):
        for number, (x, y) in enumerate(loader):
            self.optimizer.zero_grad()
            loss = self.forward(x, y)
            {}

trainer = Trainer(nn.Linear(8, 4))
trainer.fit(loader)
"""


def trainer(*lines: str) -> str:
    """The class with these lines in its loop."""
    return TRAINER.format("\n            ".join(lines))


_T_STEP = ("self.scaler.step(self.optimizer)", "self.scaler.update()")
_T_BACK = "self.scaler.scale(loss).backward()"

SPELLINGS: dict[str, list[str]] = {
    "amp-backward": [
        # No scaler in the script: the advice must not use one.
        "import torch\nfrom torch.cuda import amp\nmodel = torch.nn.Linear(8, 4).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x, y in loader:\n    loss = model(x).square().mean()\n"
        "    amp.backward(loss=loss)  # <-\n    optimizer.step()\n",
    ],
    "scaler-unscale": [
        LOOP + "    scaler.scale(loss).backward()\n    scaler.unscale(optimizer=optimizer)  # <-\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer)\n    scaler.update()\n",
    ],
    "unscaled-step": [trainer(_T_BACK, "self.optimizer.step()  # <-", "self.scaler.update()").replace(
        "self.scaler.update()", "pass")],
    "unscaled-backward": [
        LOOP + "    loss.backward()  # <-\n    scaler.step(optimizer)\n    scaler.update()\n",
        trainer("(loss / 2).backward()  # <-", *_T_STEP),
        NET + "def backward(value):\n    value.backward()  # <-\n\nfor x, y in loader:\n" + FORWARD
        + "    backward(loss)\n    scaler.step(optimizer)\n    scaler.update()\n",
        LOOP + "    torch.autograd.backward(loss)  # <-\n    scaler.step(optimizer)\n    scaler.update()\n",
    ],
    "missing-update": [
        trainer(_T_BACK, "self.scaler.step(self.optimizer)  # <-"),
        NET + "optimizers = [optimizer]\nfor x, y in loader:\n" + FORWARD
        + "    scaler.scale(loss).backward()\n    for one in optimizers:\n        scaler.step(one)  # <-\n",
    ],
    "update-between-steps": [
        NET + "second = nn.Linear(8, 4).cuda()\noptimizer2 = torch.optim.SGD(second.parameters(), lr=0.1)\n"
        "def finish(which):\n    scaler.step(which)\n\nfor x, y in loader:\n" + FORWARD
        + "        loss = loss + second(x).square().mean()\n    scaler.scale(loss).backward()\n"
        "    finish(optimizer)\n    scaler.update()  # <-\n    finish(optimizer2)\n",
    ],
    "update-in-window": [
        NET + "micro = 0\nfor x, y in loader:\n" + FORWARD.replace("    optimizer.zero_grad()\n", "")
        + "    scaler.scale(loss / 2).backward()\n    micro += 1\n    if micro == 2:\n        scaler.step(optimizer)\n"
        "        optimizer.zero_grad()\n        micro = 0\n    scaler.update()  # <-\n",
        trainer(_T_BACK, "last = number % 2 == 1", "if last:", "    self.scaler.step(self.optimizer)",
                "self.scaler.update()  # <-"),
    ],
    "clip-before-unscale": [
        LOOP + "    scaler.scale(loss).backward()\n    for p in model.parameters():\n        p.grad.clamp_(-1, 1)  # <-\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
        trainer(_T_BACK, "self.clip()", *_T_STEP).replace(
            "    def fit", "    def clip(self):\n        nn.utils.clip_grad_value_(self.model.parameters(), 1.0)  # <-\n\n    def fit"),
        LOOP + "    scaler.scale(loss).backward()\n    for group in optimizer.param_groups:\n        for p in group['params']:\n"
        "            p.grad.data = torch.clamp(p.grad.data, -1, 1)  # <-\n    scaler.step(optimizer)\n    scaler.update()\n",
        LOOP + "    scaled = scaler.scale(loss)\n    scaled.backward()\n    clip = torch.nn.utils.clip_grad_norm_\n"
        "    clip(model.parameters(), 1.0)  # <-\n    scaler.step(optimizer)\n    scaler.update()\n",
    ],
    "unscale-again": [
        LOOP + "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n    print(model.body.weight.grad.norm())\n"
        "    scaler.unscale_(optimizer)  # <-\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
        trainer(_T_BACK, "self.scaler.unscale_(self.optimizer)", "self.clip()", *_T_STEP).replace(
            "    def fit", "    def clip(self):\n        opt = self.optimizer\n        self.scaler.unscale_(opt)  # <-\n"
            "        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n\n    def fit"),
    ],
    "unscale-in-window": [
        NET + "for step, (x, y) in enumerate(loader):\n" + FORWARD.replace("    optimizer.zero_grad()\n", "")
        + "    scaler.scale(loss / 2).backward()\n    scaler.unscale_(optimizer)  # <-\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    if (step + 1) % 2 == 0:\n"
        "        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n",
        NET + "for step, (x, y) in enumerate(loader):\n    optimizer.zero_grad()\n    for part, target in zip(x.chunk(2), y.chunk(2)):\n"
        "        with torch.autocast('cuda', dtype=torch.float16):\n            loss = F.cross_entropy(model(part), target)\n"
        "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)  # <-\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    ],
    "update-skipped": [
        LOOP + "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n"
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    if norm < 0.1:\n"
        "        scaler.step(optimizer)\n        scaler.update()  # <-\n",
        trainer(_T_BACK, "self.scaler.unscale_(self.optimizer)",
                "norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)", "if not norm < 0.1:",
                "    self.optimizer.zero_grad()", "    continue", "self.scaler.step(self.optimizer)",
                "self.scaler.update()  # <-"),
    ],
    "other-optimizer": [
        NET + "second = nn.Linear(8, 4).cuda()\noptimizer2 = torch.optim.SGD(second.parameters(), lr=0.1)\n"
        "for x, y in loader:\n" + FORWARD + "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer2)  # <-\n    scaler.update()\n",
        NET + "second = nn.Linear(8, 4).cuda()\noptimizer2 = torch.optim.SGD(second.parameters(), lr=0.1)\n"
        "for x, y in loader:\n" + FORWARD + "    scaler.scale(loss).backward()\n    scaler.step(optimizer2)  # <-\n    scaler.update()\n",
    ],
    "scheduler-order": [
        NET + "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)\nfor x, y in loader:\n" + FORWARD
        + "    scaler.scale(loss).backward()\n    schedule.step()  # <-\n    scaler.step(optimizer)\n    scaler.update()\n",
        trainer("self.schedule.step()  # <-", _T_BACK, *_T_STEP).replace(
            "        self.loss", "        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=99)\n        self.loss"),
    ],
    "scheduler-skipped": [
        NET + "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)\nfor x, y in loader:\n" + FORWARD
        + STEP + "    schedule.step()  # <-\n",
        trainer(_T_BACK, "self.finish()").replace("        self.loss",
            "        self.warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer)\n        self.loss").replace(
            "    def fit", "    def finish(self):\n        self.scaler.step(self.optimizer)\n        self.scaler.update()\n"
            "        self.warmup.step()  # <-\n\n    def fit"),
        "import torch\n\ndef train(model, loader, optimizer, scheduler, scaler):\n    for x, y in loader:\n"
        "        with torch.autocast('cuda', dtype=torch.float16):\n            loss = model(x).square().mean()\n"
        "        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
        "        if scheduler is not None:\n            scheduler.step()  # <-\n",
    ],
    "average-skipped": [
        NET + "ema = torch.optim.swa_utils.AveragedModel(model)\nfor x, y in loader:\n" + FORWARD
        + STEP + "    ema.update_parameters(model)  # <-\n",
        NET + "import copy\nslow = copy.deepcopy(model)\ndef update_ema(slow, model, decay=0.99):\n"
        "    for one, other in zip(slow.parameters(), model.parameters()):\n"
        "        one.data.mul_(decay).add_(other.data, alpha=1 - decay)\n\nfor x, y in loader:\n" + FORWARD
        + STEP + "    update_ema(slow, model)  # <-\n",
        NET + "import copy\nema_model = copy.deepcopy(model)\nfor x, y in loader:\n" + FORWARD + STEP
        + "    with torch.no_grad():\n        for e, p in zip(ema_model.parameters(), model.parameters()):\n"
        "            e.lerp_(p, 0.01)  # <-\n",
    ],
    "scaler-not-saved": [
        LOOP + STEP + "state = dict(model=model.state_dict(), optimizer=optimizer.state_dict())  # <-\n"
        "torch.save(state, path)\nread = torch.load(path)\noptimizer.load_state_dict(read['optimizer'])  # <-\n",
        LOOP + STEP + "state = {}\nstate['optimizer'] = optimizer.state_dict()  # <-\ntorch.save(state, path)\n",
        trainer(_T_BACK, *_T_STEP, "self.save()").replace("    def fit", "    def save(self):\n"
            "        torch.save({'model': self.model.state_dict(), 'opt': self.optimizer.state_dict()}, path)  # <-\n\n    def fit"),
    ],
    "scaler-in-loop": [
        NET.replace('scaler = torch.amp.GradScaler("cuda")\n', "def made():\n    return torch.amp.GradScaler('cuda')\n\n")
        + "for x, y in loader:\n    scaler = made()  # <-\n" + FORWARD + STEP,
    ],
    "deprecated-amp": [
        "import torch\nfrom torch.cuda.amp import GradScaler\nmodel = torch.nn.Linear(8, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nscaler = torch.amp.GradScaler('cuda')\n"
        "assert isinstance(scaler, GradScaler)  # <-\n",
        "import torch\nfrom torch.cuda.amp import custom_fwd, custom_bwd\nclass Twice(torch.autograd.Function):\n"
        "    @staticmethod\n    @custom_fwd(cast_inputs=torch.float32)  # <-\n    def forward(ctx, x):\n        return x * 2\n"
        "    @staticmethod\n    @custom_bwd  # <-\n    def backward(ctx, g):\n        return g * 2\n"
        "Twice.apply(torch.ones(3, requires_grad=True)).sum().backward()\n",
        "import torch.nn as nn\nfrom torch.cuda import amp\nmodel = nn.Linear(8, 4)\nregion = amp.autocast  # <-\n"
        "with region():\n    model(loader[0][0])\n",
    ],
    "backward-in-autocast": [
        trainer("with autocast('cuda', dtype=torch.float16):", "    value = self.forward(x, y)",
                "    self.scaler.scale(value).backward()  # <-", *_T_STEP),
        NET + "region = torch.autocast('cuda', dtype=torch.float16)\ndef back(value):\n    scaler.scale(value).backward()  # <-\n\n"
        "for x, y in loader:\n    optimizer.zero_grad()\n    with region:\n        back(F.cross_entropy(model(x), y))\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    ],
    "banned-loss": [
        NET + "class Criterion(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.bce = nn.BCELoss()  # <-\n"
        "    def forward(self, p, y):\n        return self.bce(p, y)\n\ncriterion = Criterion()\nfor x, y in loader:\n"
        "    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        loss = criterion(torch.sigmoid(model(x)), F.one_hot(y, 4).float())\n" + STEP,
        NET + "def cost(p, y):\n    return F.binary_cross_entropy(p, y)  # <-\n\nfor x, y in loader:\n"
        "    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        loss = cost(model(x).clamp(0.1, 0.9), F.one_hot(y, 4).float())\n" + STEP,
        trainer(_T_BACK, *_T_STEP).replace("nn.CrossEntropyLoss()", "nn.BCELoss()  # <-").replace(
            "self.loss(self.model(x), y)", "self.loss(self.model(x).sigmoid(), nn.functional.one_hot(y, 4).float())"),
    ],
    "custom-function": [
        NET + "class Product(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, w):  # <-\n"
        "        ctx.save_for_backward(x, w)\n        return x @ w.t()\n    @staticmethod\n    def backward(ctx, g):\n"
        "        x, w = ctx.saved_tensors\n        return g @ w, g.t() @ x\n\nfor x, y in loader:\n    optimizer.zero_grad()\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        loss = F.cross_entropy(Product.apply(x, model.body.weight), y)\n" + STEP,
        "from torch.amp import custom_fwd\n" + NET + "class Product(torch.autograd.Function):\n    @staticmethod\n"
        "    @custom_fwd(device_type='cuda')\n    def forward(ctx, x, w):\n        ctx.save_for_backward(x, w)\n"
        "        return F.linear(x, w)\n    @staticmethod\n    def backward(ctx, g):  # <-\n        x, w = ctx.saved_tensors\n"
        "        return g.mm(w), g.t().mm(x)\n\nproduct = Product.apply\nfor x, y in loader:\n    optimizer.zero_grad()\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = F.cross_entropy(product(x, model.body.weight), y)\n" + STEP,
    ],
    "small-guard": [
        NET + "EPS = 1e-8\nfor x, y in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        out = model(x).cuda()\n        loss = (out / (out.abs() + EPS)).square().mean() + out.square().mean()  # <-\n" + STEP,
        NET + "def ratio(a, b, eps=1e-9):\n    return a / (b + eps)  # <-\n\nfor x, y in loader:\n    optimizer.zero_grad()\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        out = model(x)\n        loss = ratio(out, out.abs()).mean()\n" + STEP,
        NET + "tiny = torch.tensor(1e-8).half()\nfor x, y in loader:\n    optimizer.zero_grad()\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = torch.log(x.square().sum() + tiny) * model(x).mean()  # <-\n" + STEP,
        "import torch\nfrom torch import nn\nnet = nn.Linear(8, 4).cuda().half()\nfor x, y in loader:\n"
        "    out = net(x.half())\n    out = out.to('cuda')\n    print((out / out.norm(dim=-1, keepdim=True).clamp(min=1e-8)).mean())  # <-\n",
    ],
    "large-mask": [
        NET + "for x, y in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        s = model(x).cuda()\n        s = s + (1.0 - keep) * -1e9  # <-\n        loss = s.square().mean() * 1e-9\n" + STEP,
        NET + "BIG = -1e9\nfor x, y in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        s = model(x)\n        s[keep == 0] = BIG  # <-\n        loss = s.softmax(-1).square().mean()\n" + STEP,
        NET + "for x, y in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        s = model(x)\n        s = torch.where(keep == 1, s, torch.tensor(-1e9, dtype=s.dtype))  # <-\n"
        "        loss = s.softmax(-1).square().mean()\n" + STEP,
        "import torch\nmask = torch.full((4, 4), -1e9).half()  # <-\nprint(torch.randn(4, 4).half() + mask)\n",
    ],
    "half-weights": [
        "import torch\nimport torch.nn.functional as F\nfrom transformers import AutoModelForCausalLM\nfrom peft import LoraConfig, get_peft_model\n"
        "model = AutoModelForCausalLM.from_pretrained('x', torch_dtype=torch.float16)  # <-\n"
        "model = get_peft_model(model, LoraConfig(r=8))\n"
        "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])\nscaler = torch.amp.GradScaler('cuda')\n"
        "for x, y in loader:\n" + FORWARD + STEP,
        NET.replace("optimizer =", "model.to('cuda', torch.float16)  # <-\nparameters = list(model.parameters())\noptimizer =").replace(
            "(model.parameters(), lr", "(parameters, lr") + "for x, y in loader:\n" + FORWARD + STEP,
    ],
    "apex-loss-id": [
        "import torch\nfrom apex import amp\nmodel = torch.nn.Linear(8, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O1', num_losses=2)\nfor x, y in loader:\n"
        "    with amp.scale_loss(model(x).mean(), optimizer, loss_id=0) as scaled:\n        scaled.backward()\n"
        "    with amp.scale_loss(model(x).square().mean(), optimizer, loss_id=2) as scaled:  # <-\n        scaled.backward()\n    optimizer.step()\n",
        "import torch\nimport apex.amp as mixed\nmodel = torch.nn.Linear(8, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = mixed.initialize(model, optimizer, opt_level='O1')\nNUMBER = 1\nfor x, y in loader:\n"
        "    with mixed.scale_loss(model(x).mean(), optimizer, 0) as scaled:\n        scaled.backward()\n"
        "    with mixed.scale_loss(model(x).square().mean(), optimizer, NUMBER) as scaled:  # <-\n        scaled.backward()\n    optimizer.step()\n",
    ],
    "apex-clip": [
        "import torch\nfrom apex import amp\nmodel = torch.nn.Linear(8, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O2')\nfor x, y in loader:\n    loss = model(x).mean()\n"
        "    with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-\n    optimizer.step()\n",
        "import torch\nfrom torch.nn.utils import clip_grad_norm_\nfrom apex import amp\nmodel = torch.nn.Linear(8, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n"
        "for x, y in loader:\n    loss = model(x).mean()\n    with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()\n"
        "        clip_grad_norm_(model.parameters(), max_norm=1.0)  # <-\n    optimizer.step()\n",
    ],
}  # fmt: skip

SPELLINGS["detached-generator-loss"] = [
    NET.replace(
        "model = Net",
        "critic = nn.Linear(4, 1).cuda()\nother = torch.optim.SGD(critic.parameters(), lr=0.1)\nmodel = Net",
    )
    + """\
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        fake = model(x)
        frozen = fake.detach()  # <-
        judged = critic(fake.detach()).mean()
    other.zero_grad()
    scaler.scale(judged).backward()
    scaler.step(other)
    with torch.autocast("cuda", dtype=torch.float16):
        cost = -critic(frozen).mean()
    optimizer.zero_grad()
    scaler.scale(cost).backward()
    scaler.step(optimizer)
    scaler.update()
"""
]
SEEDED = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast

class Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return q @ k.t()
    @staticmethod
    def backward(ctx, g):
        q, k = ctx.saved_tensors
        return g @ k, g.t() @ q

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x, mask):
        h = self.first(x)
        s = Scores.apply(h, h)
        s = s.masked_fill(mask, -1e9)
        h = torch.softmax(s, -1) @ h
        h = h / (h.abs() + 1e-8)
        return self.last(h)

torch.manual_seed(0)
model = Net().half()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
average = torch.optim.swa_utils.AveragedModel(model)
bce = nn.BCELoss()
x = torch.randn(6, 8)
y = F.one_hot(x[:, :4].argmax(1), 4).float()
mask = ~torch.eye(6).bool()
losses = []
scaler = GradScaler(init_scale=2.0**60)
for step in range(120):
    optimizer.zero_grad()
    with autocast(True, torch.float16):
        p = torch.sigmoid(model(x, mask))
        loss = bce(p, y)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    schedule.step()
    scaler.step(optimizer)
    average.update_parameters(model)
    losses.append(loss.item())
torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict()), path)
state = torch.load(path)
optimizer.load_state_dict(state["optimizer"])
"""

BACKWARD = "    scaler.scale(loss).backward()\n"
# Further ones: a rule, and a script whose faulty line is not marked.
FURTHER: list[tuple[str, str]] = [
    ("large-mask", NET+"def contrast(z, temperature=0.1):\n    alike = z @ z.t() / temperature\n    alike = alike.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -1e9)\n    return F.cross_entropy(alike, torch.arange(len(z), device=z.device).roll(1))\nfor x, y in loader:\n    with torch.autocast('cuda', dtype=torch.float16):\n        loss = contrast(F.normalize(model(x).float(), dim=-1, eps=1e-6))\n    optimizer.zero_grad()\n"+STEP),
    ("clip-before-unscale", NET+"schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)\nfor number, (x, y) in enumerate(loader):\n"+FORWARD+"    scaler.scale(loss / 2).backward()\n    if number % 2:\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        before = scaler.get_scale()\n        scaler.step(optimizer)\n        scaler.update()\n        if before <= scaler.get_scale():\n            schedule.step()\n        optimizer.zero_grad()\n"),
    ("unscaled-backward", NET+"class Dice(nn.Module):\n    def __init__(self, smooth=1.0):\n        super().__init__()\n        self.smooth = smooth\n    def forward(self, logits, target):\n        p = torch.sigmoid(logits.float())\n        inter, total = (p * target).sum(1), p.sum(1) + target.sum(1)\n        return 1 - ((2 * inter + self.smooth) / (total + self.smooth)).mean()\ndice = Dice()\ndef train(net, rows, device):\n    bce = nn.BCEWithLogitsLoss()\n    for x, y in rows:\n        x, y = x.to(device), F.one_hot(y, 4).float().to(device)\n        optimizer.zero_grad()\n        with torch.autocast('cuda', dtype=torch.float16):\n            pred = net(x)\n            loss = bce(pred, y) + dice(pred, y)\n        loss.backward()\n        scaler.step(optimizer)\n        scaler.update()\ntrain(model, loader, 'cuda')\n"),
    ("scheduler-skipped", NET+"head = nn.Linear(8, 4).cuda()\nopts = [optimizer, torch.optim.SGD(head.parameters(), lr=0.1)]\nwarm = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, step / 9)) for one in opts]\nfor x, y in loader:\n    for one in opts:\n        one.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n        loss = F.cross_entropy(model(x) + head(x), y)\n    scaler.scale(loss).backward()\n    for one in opts:\n        scaler.step(one)\n    scaler.update()\n    for each in warm:\n        each.step()\n"),
    ("average-skipped", NET+"class Native:\n    def __init__(self):\n        self._scaler = torch.amp.GradScaler('cuda')\n    def __call__(self, loss, optimizer, parameters=None, need_update=True):\n        self._scaler.scale(loss).backward()\n        if need_update:\n            self._scaler.unscale_(optimizer)\n            torch.nn.utils.clip_grad_norm_(parameters, 1.0)\n            self._scaler.step(optimizer)\n            self._scaler.update()\nnative, ema = Native(), torch.optim.swa_utils.AveragedModel(model)\ndef epoch(net, rows, loss_scaler, ema):\n    for number, (x, y) in enumerate(rows):\n        need = number % 2 == 1\n        with torch.autocast('cuda', dtype=torch.float16):\n            loss = F.cross_entropy(net(x), y) / 2\n        loss_scaler(loss, optimizer, parameters=net.parameters(), need_update=need)\n        if need:\n            optimizer.zero_grad()\n            ema.update_parameters(net)\nepoch(model, loader, native, ema)\n"),
    ("clip-before-unscale", NET+"for p in model.parameters():\n    p.register_hook(lambda g: torch.clamp(g, -1.0, 1.0))\nfor x,y in loader:\n"+FORWARD+STEP),
    ("clip-before-unscale", LOOP+"    scaler.scale(loss).backward()\n    grads = [p.grad for p in model.parameters() if p.grad is not None]\n    for g in grads:\n        g.clamp_(-1, 1)\n    scaler.step(optimizer)\n    scaler.update()\n"),
    ("unscaled-step", NET+"opts = {'a': optimizer}\nfor x,y in loader:\n"+FORWARD+"    scaler.scale(loss).backward()\n    opts['a'].step()\n"),
    ("scheduler-skipped", NET+"scheds = [torch.optim.lr_scheduler.StepLR(optimizer,1)]\nfor x,y in loader:\n"+FORWARD+STEP+"    for s in scheds:\n        s.step()\n"),
    ("average-skipped", NET+"class EMA:\n    def __init__(self, net, decay):\n        self.shadow = {k: v.clone() for k, v in net.state_dict().items()}\n        self.decay = decay\n    def update(self, net):\n        for k, v in net.state_dict().items():\n            self.shadow[k].mul_(self.decay).add_(v, alpha=1-self.decay)\naverager = EMA(model, 0.9)\nfor x,y in loader:\n"+FORWARD+STEP+"    averager.update(model)\n"),
    ("update-skipped", LOOP+"    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    if torch.isnan(norm) or torch.isinf(norm):\n        optimizer.zero_grad()\n    else:\n        scaler.step(optimizer)\n        scaler.update()\n"),
    ("update-skipped", NET+"for i,(x,y) in enumerate(loader):\n"+FORWARD+"    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    if i % 2 == 0:\n        scaler.update()\n"),
    ("other-optimizer", "import torch\nfrom torch import nn\nclass G:\n    def __init__(self):\n        self.g, self.d = nn.Linear(8,8), nn.Linear(8,1)\n        self.og = torch.optim.SGD(self.g.parameters(), lr=0.1)\n        self.od = torch.optim.SGD(self.d.parameters(), lr=0.1)\n        self.scaler = torch.amp.GradScaler('cuda')\n    def fit(self, loader):\n        for x, y in loader:\n            with torch.autocast('cuda', dtype=torch.float16):\n                fake = self.g(x)\n                ld = self.d(x).mean() - self.d(fake.detach()).mean()\n            self.od.zero_grad()\n            self.scaler.scale(ld).backward()\n            self.scaler.step(self.og)\n            self.scaler.update()\nG().fit(loader)\n"),
    ("small-guard", NET+"class RMS(nn.Module):\n    def __init__(self, eps=1e-8):\n        super().__init__()\n        self.eps = eps\n        self.fc = nn.Linear(8,4)\n    def forward(self, x):\n        h = self.fc(x)\n        return h * (h.mean(-1, keepdim=True).abs() + self.eps) ** -0.5\nrms = RMS()\nfor x,y in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n        loss = rms(x).mean() + model(x).mean()\n"+STEP),
    ("half-weights", trainer("self.scaler.scale(loss).backward()","self.scaler.step(self.optimizer)","self.scaler.update()").replace("Trainer(nn.Linear(8, 4))","Trainer(nn.Linear(8, 4).half())")),
    ("half-weights", "import torch\nimport torch.nn.functional as F\nfrom transformers import AutoModelForCausalLM\nfrom peft import get_peft_model, LoraConfig\nbase = AutoModelForCausalLM.from_pretrained('x', dtype='float16', device_map='auto')\nnet = get_peft_model(base, LoraConfig())\nparams = filter(lambda p: p.requires_grad, net.parameters())\noptimizer = torch.optim.AdamW(params)\nscaler = torch.amp.GradScaler('cuda')\nfor x,y in loader:\n    with torch.autocast('cuda'):\n        loss = F.cross_entropy(net(x), y)\n"+STEP),
    ("unscaled-backward", "import torch\nimport torch.nn.functional as F\nfrom torch.cuda import amp as _a\nfrom torch.amp import GradScaler, autocast\ndef train_step(net, opt, grad_scaler, x, y):\n    opt.zero_grad()\n    with autocast('cuda', dtype=torch.float16):\n        out = net(x)\n        loss = F.cross_entropy(out, y)\n    loss.backward()\n    grad_scaler.step(opt)\n    grad_scaler.update()\ndef main():\n    net = torch.nn.Linear(8,4).cuda()\n    opt = torch.optim.SGD(net.parameters(), lr=0.1)\n    gs = GradScaler('cuda')\n    for x, y in loader:\n        train_step(net, opt, gs, x, y)\nmain()\n"),
    ("unscale-again", NET+"def grad_norm():\n    scaler.unscale_(optimizer)\n    return sum(p.grad.norm() for p in model.parameters())\nfor x,y in loader:\n"+FORWARD+BACKWARD+"    print(grad_norm().item())\n    scaler.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer)\n    scaler.update()\n"),
    ("unscale-in-window", trainer("self.scaler.scale(loss).backward()","self.clip()","self.count = getattr(self, 'count', 0) + 1","if self.count % 2:","    continue","self.scaler.step(self.optimizer)","self.scaler.update()").replace("    def fit","    def clip(self):\n        self.scaler.unscale_(self.optimizer)\n        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n\n    def fit")),
    ("clip-before-unscale", NET+"net2 = nn.Linear(8,4).cuda()\nopt2 = torch.optim.SGD(net2.parameters(), lr=0.1)\nfor x,y in loader:\n    opt2.zero_grad()\n"+FORWARD+"        loss = loss + F.cross_entropy(net2(x), y)\n"+BACKWARD+"    scaler.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(net2.parameters(), 1.0)\n    scaler.step(optimizer)\n    scaler.step(opt2)\n    scaler.update()\n"),
    ("scheduler-skipped", trainer("self.scaler.scale(loss).backward()","self.scaler.step(self.optimizer)","self.lr.step()","self.scaler.update()").replace("        self.loss","        self.lr = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)\n        self.loss")),
    ("average-skipped", NET+"import copy\navg = copy.deepcopy(model)\ndef momentum_update(avg_model, net, m):\n    for a, b in zip(avg_model.parameters(), net.parameters()):\n        a.data = a.data * m + b.data * (1 - m)\nfor x,y in loader:\n"+FORWARD+STEP+"    momentum_update(avg, model, 0.9)\n"),
    ("small-guard", NET+"def cosine(a, b):\n    num = (a * b).mean(-1)\n    den = a.abs().mean(-1) * b.abs().mean(-1)\n    return num / (den + 1e-8)\nfor x,y in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n        a = model(x)\n        loss = cosine(a, a).mean()\n"+STEP),
    ("large-mask", "import torch\nfrom torch import nn\nlin = nn.Linear(4,4).half().cuda()\nscores = lin(torch.randn(4,4).half())\nbias = (torch.ones(4,4).triu(1) * -1e9).to(scores.dtype)\nscores = scores + bias\n"),
    ("scaler-not-saved", LOOP+STEP+"torch.save({'o': optimizer.state_dict(), 's': scaler.state_dict()}, path)\nck = torch.load(path)\noptimizer.load_state_dict(ck['o'])\n"),
    ("banned-loss", trainer("self.scaler.scale(loss).backward()","self.scaler.step(self.optimizer)","self.scaler.update()").replace("nn.CrossEntropyLoss()","Bce()").replace("class Trainer","class Bce(nn.Module):\n    def __init__(self, weight=None):\n        super().__init__()\n        self.fn = torch.nn.functional.binary_cross_entropy\n    def forward(self, p, y):\n        return self.fn(p.sigmoid(), nn.functional.one_hot(y, 4).float())\n\nclass Trainer")),
    ("custom-function", NET+"class Lin(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, w):\n        ctx.save_for_backward(x, w)\n        return torch.nn.functional.linear(x, w)\n    @staticmethod\n    def backward(ctx, g):\n        x, w = ctx.saved_tensors\n        return torch.matmul(g, w), torch.matmul(g.t(), x)\ndef lin(x, w):\n    return Lin.apply(x, w)\nfor x,y in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n        loss = F.cross_entropy(lin(x, model.body.weight), y)\n"+STEP),
    ("apex-loss-id", "import torch\nfrom apex import amp\nm = torch.nn.Linear(8,4)\no = torch.optim.SGD(m.parameters(), lr=0.1)\nm, o = amp.initialize(m, o, num_losses=2)\ndef back(loss, number):\n    with amp.scale_loss(loss, o, loss_id=number) as s:\n        s.backward()\nfor x,y in loader:\n    back(m(x).mean(), 0)\n    back(m(x).mean(), 2)\n    o.step()\n"),
]  # fmt: skip
