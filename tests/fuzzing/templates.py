"""The statements that programs are grown from, as texts with holes.

Holes: ``<f>`` a float value, ``<g>`` one of the same shape, ``<h>`` any other, ``<t>`` one that a
statement has made, ``<q>`` one with four dimensions, ``<c>`` with three, ``<i>`` integers, ``<b>``
booleans, ``<u>`` an argument without gradient, ``<ids>`` indices below 7; of ``<f>``: ``<d>``,
``<e>`` two dimensions, ``<n>`` the size of the first, ``<last>`` and ``<C>`` its last and second
size; ``<w>`` a parameter as long as the last dimension, ``<W>`` a weight for it, ``<B>`` such a
buffer, ``<N>`` a counter; ``<k>`` a number, ``<p>`` a probability, ``<new>`` a new value.
``@[nn.X(...)]@`` is a submodule. A statement that does not run is not taken.
"""

ELEMENTWISE = (
    "torch.tanh(<f>)", "<f>.sigmoid()", "torch.sin(<f>)", "torch.cos(<f>) + <f>", "<f> * <g>",
    "<f> + <g>", "<f> - <k> * <g>", "<f> / (1.5 + <g>.abs())", "torch.exp(<f>.clamp(-3, 1))",
    "<f>.square()", "F.relu(<f>)", "F.gelu(<f>)", "F.gelu(<f>, approximate='tanh')", "F.silu(<f>)",
    "F.elu(<f>)", "F.softplus(<f>)", "F.hardswish(<f>)", "F.mish(<f>)", "F.leaky_relu(<f>, 0.1)",
    "F.celu(<f>)", "F.selu(<f>)", "F.hardtanh(<f>)", "F.logsigmoid(<f>)", "F.softsign(<f>)",
    "F.tanhshrink(<f>)", "F.hardshrink(<f>)", "F.relu6(<f>)", "torch.where(<f> > <k>, <f>, <g>)",
    "torch.maximum(<f>, <g>)", "torch.lerp(<f>, <g>, 0.3)",
    "torch.addcmul(<f>, <f>, <g>, value=0.2)", "torch.addcdiv(<f>, <g>, 2.0 + <f>.abs())",
    "<f>.abs().add(0.1).log()", "<f>.abs().add(0.1).sqrt()", "<f>.abs().add(1.0).rsqrt()",
    "<f>.clamp(-0.7, 0.9)", "<f>.sign() * <g>", "torch.erf(<f>)", "<f>.atan()", "-<f>",
    "torch.hypot(<f>, <g> + 0.1)", "torch.atan2(<f>, <g> + 0.3)", "<f> * <w>", "<f> + <w>",
    "<f> + <h>", "<f> * <h>", "<f> * <B>", "<f> + <B>.exp()", "<f> ** 2", "<f> % 0.7",
    "<f>.masked_fill(<f> > <k>, 0.0)", "F.glu(torch.cat([<f>, <g>], -1))", "<f>.expm1().tanh()",
    "torch.logaddexp(<f>, <g>)", "<f> * (<g> > 0)", "<f> * <i>", "<f>.nan_to_num()",
    "torch.xlogy(<f>.abs(), <g>.abs() + 0.1)", "F.prelu(<f>, <w>[:1])",
    "F.threshold(<f>, 0.1, 0.2)", "<f>.where(<b>, <f> * 0.5)", "torch.heaviside(<f>, <g>) + <f>",
    "<f>.trunc() + <f>", "<f>.contiguous() * 2", "<f>.clone()", "torch.sinc(<f>)", "<f> * 1.0",
    "<f>.float()",
)  # fmt: skip

PRODUCTS = (
    "F.linear(<f>, <W>)", "F.linear(<f>, <W>, None).tanh()", "torch.tanh(<f> @ <W>.t())",
    "@[nn.Linear(<last>, <m>)]@(<f>)", "@[nn.Linear(<last>, <last>)]@(<f>)", "<f> @ <f>.mT",
    "torch.einsum('...i,...i->...', <f>, <g>)", "torch.einsum('...i,ji->...j', <f>, <W>)",
    "<f>.flatten(0, -2) @ <W>.t()", "<f> @ <g>.transpose(-1, -2)", "torch.outer(<w>, <w>)",
    "torch.bmm(<c>, <c>.transpose(1, 2))", "<f> @ <w>",
    "@[nn.Bilinear(<last>, <last>, 3)]@(<f>, <g>)", "torch.baddbmm(<c> @ <c>.mT, <c>, <c>.mT)",
    "F.conv2d(<q>, @[nn.Conv2d(<qC>, 3, 3)]@.weight)", "@[nn.Conv2d(<qC>, 4, 3, padding=1)]@(<q>)",
    "@[nn.Conv1d(<cC>, 3, 2)]@(<c>)", "@[nn.ConvTranspose2d(<qC>, 2, 2)]@(<q>)",
    "@[nn.Conv2d(<qC>, <qC>, 1, groups=<qC>)]@(<q>)", "torch.cdist(<c>, <c> + 0.5)",
    "F.cosine_similarity(<f>, <g>, dim=-1)", "F.linear(<f>, F.normalize(<W>, dim=-1))",
    "torch.addmm(<w>[:1], <f>.flatten(0, -2), <W>.t())",
    "torch.tensordot(<f>, <g>, dims=([0], [0]))", "torch.kron(<w>, <w>)",
)  # fmt: skip

REDUCTIONS = (
    "<f>.sum(<d>)", "<f>.mean(<d>, keepdim=True)", "<f>.sum()", "<f>.mean()", "<f>.amax(<d>)",
    "<f>.logsumexp(<d>)", "<f>.var(<d>, correction=0)", "<f>.norm(dim=<d>)", "<f>.prod(<d>)",
    "<f>.cumsum(<d>)", "<f>.cumprod(<d>)", "<f>.softmax(<d>)", "<f>.log_softmax(<d>)",
    "<f> - <f>.mean(<d>, keepdim=True)", "<f> / (1 + <f>.std(<d>, keepdim=True))", "<f>.max()",
    "<f>.amin(<d>, keepdim=True) + <f>", "F.normalize(<f>, dim=<d>)", "F.mse_loss(<f>, <g>)",
    "F.smooth_l1_loss(<f>, <g>)", "F.l1_loss(<f>, <g>, reduction='none')",
    "F.huber_loss(<f>, <g>, reduction='sum')", "F.kl_div(<f>.log_softmax(-1), <g>.softmax(-1))",
    "F.binary_cross_entropy_with_logits(<f>, <g>.sigmoid())",
    "F.gaussian_nll_loss(<f>, <g>, <f>.square() + 1)",
    "F.cross_entropy(<f>.flatten(0, -2), <f>.flatten(0, -2).argmax(-1))",
    "F.cross_entropy(<f>.flatten(0, -2), <g>.flatten(0, -2).softmax(-1), label_smoothing=0.1)",
    "F.nll_loss(<f>.flatten(0, -2).log_softmax(-1), <g>.flatten(0, -2).argmin(-1), "
    "reduction='none')", "F.softmin(<f>, <d>)", "<f>.median()", "torch.trace(<f>.flatten(0, -2))",
    "<f>.logcumsumexp(<d>)", "F.max_pool2d(<q>, 2, 1)", "F.avg_pool2d(<q>, 2, 1)",
    "F.adaptive_avg_pool2d(<q>, 2)", "F.max_pool1d(<c>, 2, 1)", "F.lp_pool1d(<c>, 2, 2)",
    "F.interpolate(<q>, scale_factor=2)", "F.interpolate(<q>, size=(3, 5), mode='bilinear')",
    "F.adaptive_max_pool1d(<c>, 2)",
)  # fmt: skip

VIEWS = (
    "<f>.transpose(<d>, <e>)", "<f>.mT", "<f>[..., 1:]", "<f>[..., ::2]", "<f>[0]", "<f>[:, 0]",
    "<f>.unsqueeze(<d>)", "<f>.unsqueeze(0).expand(2, *<f>.shape)", "<f>.flatten()",
    "<f>.flatten(0, 1)", "<f>.reshape(-1)", "<f>.view(<f>.shape[0], -1)",
    "<f>.unflatten(-1, (1, -1))", "<f>.unflatten(-1, (2, -1))", "<f>.movedim(0, -1)",
    "<f>.narrow(<d>, 0, <n> - 1)", "<f>.select(<d>, <n> - 1)", "<f>.diagonal(dim1=<d>, dim2=<e>)",
    "<f>.unfold(<d>, 2, 1)", "<f>.squeeze()", "<f>.detach()", "<f>.view_as(<g>)",
    "<f>.permute(*range(<f>.dim())[::-1])", "torch.as_strided(<f>, (2, 2), (1, 1))",
    "<f>.sum(0, keepdim=True).expand_as(<f>)", "<f>.mean(-1, keepdim=True).expand(*<f>.shape)",
    "torch.broadcast_to(<w>, <f>.shape)", "<f>.swapaxes(<d>, <e>)[..., :1]", "<f>[..., None, :]",
    "<f>[-1:]", "<f>.split(1, <d>)[0]", "<f>.t()", "<f>[<f>.shape[0] // 2:]", "<f>.view(-1)[1:5]",
    "torch.atleast_3d(<f>)", "<f>.ravel()", "<f>.reshape(<f>.shape[-1], -1)", "<W>.t()", "<w>[1:]",
    "<f>.tensor_split(2, <d>)[1]", "<f>.unbind(<d>)[0]", "<f>.chunk(2, <d>)[-1]", "<u>[..., :2]",
)  # fmt: skip

MOVES = (
    "torch.cat([<f>, <g>], <d>)", "torch.stack([<f>, <g>], <d>)", "<f>.flip(<d>)",
    "<f>.roll(1, <d>)", "F.pad(<f>, (1, 0))", "<f>.repeat_interleave(2, <d>)", "<f>.tile(2)",
    "<f>.index_select(<d>, torch.tensor([0, 0]))", "<f>.gather(<d>, <f>.argsort(<d>))",
    "torch.take_along_dim(<f>, <g>.argmax(<d>, keepdim=True), <d>)",
    "<f>.scatter_add(<d>, <g>.argsort(<d>), <g>)", "<f>.scatter(<d>, <g>.argsort(<d>), 0.5)",
    "<f>.index_add(0, torch.tensor([0]), <g>[:1])", "<f>[torch.arange(<f>.shape[0]).flip(0)]",
    "<f>.index_copy(0, torch.tensor([0]), <g>[:1])", "F.embedding(<ids>, <E>)", "<E>[<ids>]",
    "@[nn.Embedding(7, 5)]@(<ids>)", "F.one_hot(<ids>, 7).float() @ <E>",
    "F.embedding(<ids>, <E>, padding_idx=2)", "torch.tril(<f>)", "torch.diag_embed(<f>)",
    "F.unfold(<q>, 2)", "F.pixel_shuffle(<q>, 1)",
    "<f>.scatter_reduce(<d>, <g>.argsort(<d>), <g>, 'amax')", "torch.combinations(<w>, 2).sum(-1)",
    "<f>.index_put((torch.tensor([0, 0]),), <g>[:1], accumulate=True)",
    "F.pad(<q>, (1, 1, 1, 1), mode='reflect')", "torch.select_scatter(<f>, <f>[0] * 2, 0, 0)",
    "torch.slice_scatter(<f>, <g>[:1], 0, 0, 1)", "F.embedding_bag(<ids>.flatten()[None], <E>)",
    "torch.masked_select(<f>, <f> == <f>).sum()", "torch.block_diag(<w>, <w>)",
    "torch.meshgrid(<w>, <w>, indexing='ij')[1]",
)  # fmt: skip

RANDOM = (
    "F.dropout(<f>, <p>)", "F.dropout(<f>, <p>)", "F.alpha_dropout(<f>, <p>, True)",
    "F.rrelu(<f>, training=True)", "<f> * torch.rand_like(<f>)", "<f> + torch.randn_like(<f>)",
    "<f> * torch.bernoulli(<g>.sigmoid())", "<f> + torch.rand(<f>.shape)",
    "torch.normal(<f>.detach(), 0.3)", "F.feature_alpha_dropout(<f>, <p>, True)",
    "F.dropout1d(<c>, <p>)", "F.dropout2d(<q>, <p>)", "F.gumbel_softmax(<f>, dim=-1)",
    "<f>[torch.randperm(<f>.shape[0])]", "F.gumbel_softmax(<f>, hard=True)",
    "<f> * torch.randint_like(<f>, 0, 3)", "@[nn.Dropout(<p>)]@(<f>)",
    "F.scaled_dot_product_attention(<c>, <c>, <c>, dropout_p=<p>)",
    "<f> * torch.empty_like(<f>).uniform_()",
    "F.scaled_dot_product_attention(<q>, <q>, <q>, dropout_p=<p>, is_causal=True)",
    "F.scaled_dot_product_attention(<c>, <c>, <c>)",
    "<f> + torch.empty(<f>.shape).exponential_(2.0)", "<f> * torch.empty_like(<f>).bernoulli_(<p>)",
    "<f> + torch.randint(0, 5, <f>.shape)", "torch.poisson(<f>.abs().detach()) * <g>",
    "<f>.detach().softmax(-1).flatten(0, -2).multinomial(1) * 0.5 * <f>.sum()",
    "@[nn.AlphaDropout(<p>)]@(<f>)",
    "@[nn.MultiheadAttention(<last>, 1, dropout=<p>, batch_first=True)]@(<c>, <c>, <c>)[0]",
)  # fmt: skip

NORMS = (
    "F.layer_norm(<f>, (<last>,))", "@[nn.LayerNorm(<last>)]@(<f>)",
    "@[nn.BatchNorm1d(<last>)]@(<f>.flatten(0, -2))", "@[nn.BatchNorm2d(<qC>)]@(<q>)",
    "@[nn.BatchNorm1d(<cC>, momentum=0.3)]@(<c>)", "@[nn.GroupNorm(1, <cC>)]@(<c>)",
    "F.group_norm(<q>, 1)", "F.instance_norm(<c>)", "F.rms_norm(<f>, (<last>,))",
    "@[nn.RMSNorm(<last>)]@(<f>)",
    "F.batch_norm(<f>.flatten(0, -2), <B>, torch.ones(<last>), training=True)",
    "F.local_response_norm(<q>, 2)",
    "@[nn.BatchNorm1d(<last>, track_running_stats=False)]@(<f>.flatten(0, -2))",
    "@[nn.LayerNorm(<last>, bias=False)]@(<f>)", "@[nn.InstanceNorm1d(<cC>, affine=True)]@(<c>)",
    "@[nn.BatchNorm1d(<last>).eval()]@(<f>.flatten(0, -2))",
)  # fmt: skip

CASTS = (
    "<f>.bfloat16()", "<f>.double()", "<f>.float()", "<f>.to(torch.float64) * 0.5",
    "(<f> * 4).long()", "(<f> > <k>)", "<f>.argmax(<d>)", "<f>.bfloat16().float()",
    "(<f> * 3).int()", "<i> + 1", "<i> * <i>", "<b> | (<f> > 1)", "<b>.float()",
    "<i>.float() * 0.1", "<f>.argsort(<d>)", "<f>.half()", "<f>.double().sin().float()",
    "<f>.type_as(<h>)", "torch.complex(<f>, <g>).abs()",
    "torch.view_as_real(torch.complex(<f>, <g>))", "torch.fft.rfft(<f>).real",
    "<f>.count_nonzero(<d>)", "<f>.isnan()", "<i>.cumsum(0)", "~<b>", "<f>.numel() * <f>",
)  # fmt: skip

OWN = (
    "Rounded.apply(<f>, 4.0)", "Squashed.apply(<f>, <g>)", "Squashed.apply(<f>, <f>)",
    "torch.cond(<f>.sum() > <k>, lambda a: a.sin() * 2, lambda a: a.cos(), (<f>,))",
    "torch.cond(<f>.mean() > 0, lambda a, b: a * b, lambda a, b: a - b, (<f>, <g>))",
    "F.multi_margin_loss(<f>.flatten(0, -2), <f>.flatten(0, -2).argmin(-1))",
    "torch.linalg.norm(<f>)",
    "torch.linalg.inv(<f>.flatten(0, -2).t() @ <f>.flatten(0, -2) + 3 * torch.eye(<last>))",
    "torch.linalg.solve(3 * torch.eye(<last>) + 0.1 * <w>[:, None], <w>)",
    "torch.nn.utils.parametrize.torch.tanh(<f>)",
    "F.ctc_loss(<f>.flatten(0, -2)[:, None].log_softmax(-1), torch.tensor([[1]]), "
    "(<f>.flatten(0, -2).shape[0],), (1,))",
    "@[nn.TransformerEncoderLayer(<last>, 1, 6, <p>, batch_first=True)]@(<c>)",
    "@[nn.Sequential(nn.Linear(<last>, 6), nn.ReLU(inplace=True), nn.Dropout(<p>), "
    "nn.Linear(6, <last>))]@(<f>)", "@[nn.GRU(<last>, 3, batch_first=True)]@(<c>)[0]",
    "@[nn.LSTM(<last>, 3)]@(<c>)[1][0]", "@[nn.RNN(<last>, 3, 2)]@(<c>)[0]",
    "@[nn.Linear(<last>, 4)]@(<f>).chunk(2, -1)[0]",
    "@[nn.utils.parametrizations.weight_norm(nn.Linear(<last>, 3))]@(<f>)",
)  # fmt: skip

SEVERAL = (
    "<new>, <new> = <f>.topk(2, <d>)", "<new>, <new> = <f>.sort(<d>)",
    "<new>, <new> = <f>.max(<d>)", "<new>, <new> = <f>.min(<d>, keepdim=True)",
    "<new>, <new> = torch.var_mean(<f>, <d>)", "<new>, <new> = <f>.chunk(2, <d>)",
    "<new>, <new> = torch.std_mean(<f>, <d>, keepdim=True)",
    "<new>, <new> = <f>.split(<n> - 1, <d>)", "<new>, <new>, *_ = <f>.unbind(<d>)",
    "<new>, <new>, *_ = <f>.unbind(-1)", "<new>, <new> = <f>.cummax(<d>)",
    "<new>, <new> = <f>.median(<d>)", "<new>, <new> = <f>.kthvalue(1, <d>)",
    "<new>, <new> = <f>.mode(<d>)", "<new>, <new> = torch.aminmax(<f>, dim=<d>)",
    "<new>, <new> = <f>.tensor_split(2, <d>)",
    "<new>, <new> = @[nn.LSTMCell(<last>, 4)]@(<f>.flatten(0, -2))",
    "<new>, <new> = @[nn.GRU(<last>, 3)]@(<c>)",
    "<new>, <new> = F.max_pool2d(<q>, 2, 1, return_indices=True)",
    "<new>, <new> = torch.linalg.qr(<f>.flatten(0, -2))",
    "<new>, <new>, *_ = (<f> * <k>).split(1, <d>)", "<new>, <new> = torch.frexp(<f>)",
    "<new>, <new> = torch.broadcast_tensors(<f>, <w>)",
    "<new>, <new> = @[nn.MultiheadAttention(<last>, 1, batch_first=True)]@(<c>, <c>, <c>)",
    "<new>, <new> = @[nn.Linear(<last>, 6)]@(<f>).chunk(2, -1)",
    "<new>, <new>, *_ = @[nn.Linear(<last>, 6)]@(<f>).unflatten(-1, (3, 2)).unbind(-2)",
)  # fmt: skip

WRITES = (
    "<t>.mul_(<k>)", "<t>.add_(<g>)", "<t>.sub_(<g>, alpha=0.5)", "<t>[..., 0].add_(<k>)",
    "<t>[..., ::2] *= 1.5", "<t>.transpose(0, -1).mul_(0.9)", "<t>.clamp_(min=-1.0)",
    "F.relu(<t>, inplace=True)", "<t>.tanh_()", "<t>.copy_(<g>)", "<t>[0] = <k>",
    "<t>[:1].copy_(<t>[-1:])", "<t>.masked_fill_(<t> > 1, 0.5)", "<t>.sigmoid_()", "<t>.zero_()",
    "<t>[0].zero_()", "F.dropout(<t>, <p>, inplace=True)", "<t>.flatten()[1:].mul_(0.7)",
    "<t> += <g>", "<t>.index_add_(0, torch.tensor([0]), <g>[:1])",
    "<t>.mul_(torch.empty_like(<t>).bernoulli_(<p>))", "<t>.unsqueeze_(0)",
    "<t>.diagonal(dim1=0, dim2=-1).add_(0.5)", "<t>.detach().mul_(0.5)",
    "<t>.select(-1, 0).copy_(<t>.select(-1, -1))", "<t>.uniform_()", "F.elu(<t>, inplace=True)",
    "<t>.fill_(<k>)", "<t>.unfold(0, 1, 1).neg_()", "<t>.exp_().clamp_(max=2.0)",
    "F.silu(<t>, inplace=True)", "<t>.addcmul_(<g>, <g>)", "<t>[<t> > 0.5] = 0.25",
    "<t>.view(-1)[:2] = <k>", "<t>.t_()", "<t>.scatter_(0, <t>.argsort(0), <k>)",
    "torch.add(<f>, <g>, out=<t>)", "<t>.lerp_(<g>, 0.3)",
    "F.rrelu(<t>, training=True, inplace=True)", "<t>.squeeze_()", "<t>.normal_()",
    "<t>.index_put_((torch.tensor([0, 0]),), <g>[:1], accumulate=True)",
    "F.hardtanh(<t>, inplace=True)", "<t>.unbind(0)[0].mul_(1.5)", "<t>.chunk(2)[0].add_(<k>)",
    "<t>.expand_as(<t>).neg_()", "<t>.pow_(2)", "<t>.cumsum_(0)",
)  # fmt: skip

UPDATES = (
    "with torch.no_grad():\n    <B>.mul_(0.9).add_(<f>.detach().mean())",
    "<B>.copy_(<f>.detach().flatten(0, -2).mean(0))", "<B>.add_(0.1)", "<N>.add_(1)", "<N> += 1",
    "<new> = <B> * 2 + <f>\n<B>.mul_(0.8)\n<new> = <f> * <B>", "<B>[0] = <k>", "<B>[1:].mul_(0.5)",
    "<B>.data.mul_(0.7)", "<new> = <B>.clone()\n<B>.lerp_(torch.ones_like(<B>), 0.2)",
    "<u>.add_(0.5)", "<u>.copy_(<u>.tanh())", "<u>.mul_(0.9)\n<new> = <f> * <u>.mean()",
    "<u>[..., 0].sub_(0.2)", "<new> = <u>.exp()\n<u>.zero_()",
    "with torch.no_grad():\n    <u>.copy_(<u> * 0.5 + <f>.mean())", "<u>.t_()",
    "<new> = <f> + <N>\n<N>.mul_(2)", "<B>.uniform_()", "<new> = <u>.view(-1)\n<u>.add_(1.0)",
    "<new> = <u>[..., 1:]\n<new> = <u> * 2\n<u>.sin_()", "<new> = <B>[1:]\n<B>.add_(<k>)",
    "<u>.bernoulli_(0.5)", "<B> = <B> * 0.5 + 0.1", "<N> = <N> + 1", "<u>.add_(<f>.detach().sum())",
)  # fmt: skip

REGIONS = (
    "with torch.no_grad():\n    <new> = torch.tanh(<f>) * <g>",
    "with torch.no_grad():\n    <new> = F.dropout(<f>, <p>)",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    <new> = F.linear(<f>, <W>)\n    "
    "<new> = <f> * 2 + <g>",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    <new> = @[nn.Linear(<last>, "
    "5)]@(<f>).tanh()",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    <new> = F.gelu(<f> @ "
    "<W>.t()).softmax(-1)",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    <new> = F.linear(F.dropout(<f>, "
    "<p>), <W>)\n    <new> = F.linear(<f>, <W>)",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    with torch.autocast('cpu', "
    "enabled=False):\n        <new> = F.linear(<f>, <W>)",
    "with torch.no_grad():\n    <new> = F.linear(<f>, <W>).softmax(-1)",
    "with torch.enable_grad():\n    <new> = <f>.sin()",
    "with torch.no_grad():\n    <new> = <f> * 2\n    <new> = <g>.cos()",
    "with torch.no_grad():\n    <new> = <f>.view(-1)",
)  # fmt: skip

IN_REGIONS = (
    "torch.tanh(a)", "a.sigmoid() * a", "F.dropout(a, <p>)", "F.gelu(a)",
    "a - a.mean(-1, keepdim=True)", "a.softmax(-1)", "torch.rand_like(a) * a",
    "Rounded.apply(a, 4.0)", "F.layer_norm(a, a.shape[-1:])", "a * b", "a + b.exp()",
    "torch.where(a > b, a, b)", "F.linear(a, <V>)", "a * torch.bernoulli(b.sigmoid())",
    "F.silu(a, inplace=True)", "F.rrelu(a, training=True)", "a.sort(-1)[0]", "a.flip(0)", "a * <w>",
    "F.linear(a, <V>).relu()", "a.transpose(0, -1).sin().transpose(0, -1)",
)  # fmt: skip


def _assigned(expressions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"<new> = {expression}" for expression in expressions)


KINDS: tuple[tuple[tuple[str, ...], int], ...] = (
    *((_assigned(ELEMENTWISE), 7), (_assigned(PRODUCTS), 3), (_assigned(REDUCTIONS), 3)),
    *((_assigned(VIEWS), 5), (_assigned(MOVES), 2), (_assigned(RANDOM), 3), (_assigned(NORMS), 2)),
    *((_assigned(CASTS), 2), (_assigned(OWN), 1), (SEVERAL, 3), (WRITES, 4), (UPDATES, 2)),
    *((REGIONS, 1), (IN_REGIONS, 1)),
)
"""Kinds of statements, and how often each is drawn."""

WRITING = (WRITES, UPDATES)
"""Those that write to values that are there."""
