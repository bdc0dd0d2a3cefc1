import torch, pytest
from one_process import *
from telegrad import autograd, rpc
seen=[]
def hooked(x):
    y = x.exp()
    y.register_hook(lambda g: seen.append(g))
    return y * 2

def test_inputs_single(group):
    x = leaf(3)
    with autograd.context() as c:
        c.backward(remotely("b", torch.exp, x).sum(), inputs=x)
        assert_equal(c.gradients[x], x.exp().detach())

def test_inputs_nonleaf_grad(group):
    x = leaf(3)
    with autograd.context() as c:
        i = x.sin()
        c.backward(remotely("b", torch.exp, i).sum(), inputs=[i], accumulate="grad")

def test_inputs_alias(group):
    x = leaf(3); g = torch.ones(3, dtype=torch.double)
    with autograd.context() as c:
        c.backward([x], grad_tensors=[g], inputs=[x], accumulate="grad")
    assert x.grad.data_ptr() != g.data_ptr()

def test_inputs_post_acc(group):
    x = leaf(3); calls=[]
    x.register_post_accumulate_grad_hook(lambda t: calls.append(t.grad.clone()))
    torch.autograd.backward(x.exp().sum(), inputs=[x]); assert len(calls)==1
    x.grad=None
    with autograd.context() as c:
        c.backward(remotely("b", torch.exp, x).sum(), inputs=[x], accumulate="grad")
    assert len(calls)==2

def test_inputs_same_twice_backward(group):
    x = leaf(3)
    torch.autograd.backward(x.exp().sum(), inputs=[x,x])
    w = x.grad; x.grad=None
    with autograd.context() as c:
        c.backward(remotely("b", torch.exp, x).sum(), inputs=[x,x])
        assert_equal(c.gradients[x], w)

def test_grad_does_not_run_beyond(group):
    seen.clear()
    x = leaf(3)
    with autograd.context() as c:
        y = remotely("b", hooked, x)
        loss = (y*y).sum()
        autograd.grad(c, loss, [y])
    assert seen == []

def test_grad_does_not_free_beyond(group):
    x = leaf(3)
    with autograd.context() as c:
        y = remotely("b", torch.exp, x)
        loss = (y*y).sum()
        autograd.grad(c, loss, [y])
        c.backward(y.sum())

def test_complex_root(group):
    z = leaf(dtype=torch.complex128)
    with pytest.raises(RuntimeError): (z*z).backward()
    with autograd.context() as c:
        with pytest.raises(RuntimeError, match="real scalar"):
            c.backward(remotely("b", torch.sin, z))

def test_nograd_caller(group):
    x = leaf(3)
    with autograd.context() as c:
        with torch.no_grad():
            y = remotely("b", torch.exp, x)
        assert not y.requires_grad
W = leaf(3)
def wt(x): return x*W
def test_nograd_caller_callee_params(group):
    x = leaf(3)
    with autograd.context() as c:
        with torch.no_grad():
            y = remotely("b", wt, x)
        assert not y.requires_grad
def test_inference_caller_callee_params(group):
    x = leaf(3)
    with autograd.context() as c:
        with torch.inference_mode():
            y = remotely("b", wt, x)
        assert not y.requires_grad
def test_recv_functions(group):
    x = leaf(3)
    with autograd.context() as c:
        y = remotely("b", torch.exp, x)
        ctx = autograd._current_context()
        assert list(ctx._recv_functions().values()) == [y.grad_fn]
def test_then(group):
    x = leaf(3)
    with autograd.context() as c:
        def cb(f):
            assert autograd._has_valid_context()
            return rpc.rpc_sync("c", torch.sin, (f.wait(),))
        y = rpc.rpc_async("b", torch.exp, (x,)).then(cb).wait()
        c.backward(y.sum())
        assert_equal(c.gradients[x], (x.exp().cos()*x.exp()).detach())
def test_then2(group):
    x = leaf(3); ag = group["a"]
    with autograd.context() as c:
        def cb(f):
            with rpc.api.acting_as(ag):
                assert autograd._has_valid_context()
                return rpc.rpc_sync("c", torch.sin, (f.wait(),))
        y = rpc.rpc_async("b", torch.exp, (x,)).then(cb).wait()
        c.backward(y.sum())
async def nested(x):
    y = await rpc.rpc_async("c", torch.sin, (x,))
    return y*2
def test_asyncio(group):
    x = leaf(3)
    with autograd.context() as c:
        y = remotely("b", nested, x)
        c.backward(y.sum())
        assert_equal(c.gradients[x], 2*x.cos().detach())
@rpc.functions.async_execution
def nested2(x):
    return rpc.rpc_async("c", torch.sin, (x,)).then(lambda f: f.wait()*2)
def test_async_execution(group):
    x = leaf(3)
    with autograd.context() as c:
        y = remotely("b", nested2, x)
        c.backward(y.sum())
        assert_equal(c.gradients[x], 2*x.cos().detach())
@rpc.functions.async_execution
def nested3(x):
    return rpc.rpc_async("c", torch.sin, (x,)).then(lambda f: rpc.rpc_sync("c", torch.exp, (f.wait(),)))
def test_async_execution3(group):
    x = leaf(3)
    with autograd.context() as c:
        y = remotely("b", nested3, x)
        c.backward(y.sum())
        assert_equal(c.gradients[x], (x.sin().exp()*x.cos()).detach())
def test_self_call(group):
    x = leaf(3)
    with autograd.context() as c:
        y = remotely("a", torch.sin, x)
        c.backward(y.sum())
        assert_equal(c.gradients[x], x.cos().detach())
