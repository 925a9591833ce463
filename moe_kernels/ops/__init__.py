"""The package's operators in torch.library, `torch.ops.moe_kernels.*`: schema, fake and autograd.

Every operator is functional, and every gradient is computed by the same operators, so gradients of any order exist,
except in fp8. Below, `to` is slot_to_row, w topk_weights, and d or dOut (dB of wgrad) the gradient of the result:

    grouped_gemm(A, B)   out[g] = A[g] @ B[g]                 dA = grouped_gemm(dOut, B^T), dB = wgrad(A, dOut)
    wgrad(A, D)          out[g] = A[g]^T @ D[g]               dA = grouped_gemm(D, dB^T),   dD = grouped_gemm(A, dB)
    uniform(A, B)        out[g] = A[g] @ B[g]                 dA = uniform(dOut, B^T),      dB = uniform(A^T, dOut)
    varied(A, B)         out[p] = A[p] @ B[p]                 dA = varied(dOut, B^T),       dB = varied(A^T, dOut)
    scatter_rows(x, w)   rows[to[s]] = w[s] * x[s // top_k]   dx = combine_rows(d, w),      dw = dot_rows(x, d)
    combine_rows(y, w)   out[t] = sum w[s] * y[to[s]]         dy = scatter_rows(d, w),      dw = dot_rows(d, y)
    dot_rows(x, y)       w[s] = <x[s // top_k], y[to[s]]>     dx = combine_rows(y, d),      dy = scatter_rows(x, d)

    activate(p)          act = f(gate) * up                   dp = activate_backward(p, d)
    swiglu_ffn(rows)     act = activate(rows @ w_in)          from the above
    moe_mlp(hidden)      out = combine_rows(act @ w_out, w)   from the above, with the routing, which it returns
    quantize(x)          data, scales in fp8                  none
    quantize_weight(w)   those of w, and of its transpose     none
    choose_experts(x)    topk_ids, topk_weights               none: `routing` computes weights again for autograd

`grouped_mm` is grouped_gemm with PyTorch's `offs`. `scaled_grouped_gemm` and `scaled_wgrad` are products of fp8
operands with scales, and `scaled_moe_mlp` is a layer with fp8 weights; they have no gradients. `quantized_moe_mlp` is
moe_mlp with products in fp8, whose operands it quantises itself, except weights that `quantize_weight` has quantised.
Its gradient uses `quantized_grouped_gemm` and `quantized_wgrad`, and raises an error when differentiated. `moe_layer`
is moe_mlp of calls that autograd does not record; for one token it has kernels that do not sort. Its gradient, for
programs that were traced in such a call, computes what moe_mlp saves. Second-order gradients of `activate` use plain
PyTorch. The rest of the package calls the functions of these names here. In eager mode they bypass torch.library, which
costs the host more time than some kernels take, unless a profiler is on, which shows operators by name. Under
torch.func transforms and in forward mode each is an autograd.Function.
"""

from moe_kernels.ops.batched import uniform_grouped_gemm, varied_grouped_gemm
from moe_kernels.ops.gating import choose_experts
from moe_kernels.ops.layer import activate, activate_backward, moe_layer, moe_mlp, swiglu_ffn
from moe_kernels.ops.moves import combine_rows, dot_rows, route, scatter_rows
from moe_kernels.ops.products import grouped_gemm, grouped_gemm_wgrad, grouped_mm
from moe_kernels.ops.quantized import quantized_grouped_gemm, quantized_moe_mlp, quantized_wgrad
from moe_kernels.ops.scaled import quantize, quantize_weight, scaled_grouped_gemm, scaled_moe_mlp, scaled_wgrad
