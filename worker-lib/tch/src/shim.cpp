// Parts of libtorch that tch does not expose: hooks on gradients, and tensors that own external
// memory.
//
// No exception leaves this file: each function returns its text, which gradwire_forget frees, or
// null.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>

namespace {

using Node = c10::intrusive_ptr<torch::autograd::Node>;
using Call = void (*)(void *);

// Called when a backward pass has added to a gradient. Owns its context.
class Ready final : public torch::autograd::FunctionPostHook {
public:
  Ready(void *context, Call run, Call drop) : context_(context, drop), run_(run) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list &outputs,
                                            const torch::autograd::variable_list &) override {
    run_(context_.get());
    return outputs;
  }

private:
  std::unique_ptr<void, Call> context_;
  Call run_;
};

template <typename F> char *guarded(F &&body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::exception &error) {
    return strdup(error.what());
  } catch (...) {
    return strdup("an exception that is not a std::exception");
  }
}

} // namespace

extern "C" {

void gradwire_forget(char *text) { free(text); }

// Calls `run(context)` after each backward pass that has added to the parameter's gradient, and
// `drop(context)` at the end. `watch` owns a reference to the autograd node that has the hook.
char *gradwire_watch(const at::Tensor *parameter, void *context, Call run, Call drop,
                     void **watch) {
  return guarded([&] {
    auto hook = std::make_unique<Ready>(context, run, drop);
    auto node = std::make_unique<Node>(torch::autograd::impl::grad_accumulator(*parameter));
    TORCH_CHECK(*node, "the parameter takes no gradients");
    (*node)->add_post_hook(std::move(hook));
    *watch = node.release();
  });
}

void gradwire_unwatch(void *watch) { delete static_cast<Node *>(watch); }

// Whether the node with the hook still produces the parameter's gradients.
bool gradwire_is_watched(const at::Tensor *parameter, const void *watch) {
  bool same = false;
  char *text = guarded([&] {
    same = torch::autograd::impl::try_get_grad_accumulator(*parameter) ==
           *static_cast<const Node *>(watch);
  });
  free(text);
  return same;
}

// A contiguous CPU tensor over `data`, with the shape and the element type of `like`. Calls
// `drop(owner)` when nothing uses the memory any more.
char *gradwire_tensor(void *data, const at::Tensor *like, void *owner, Call drop,
                      at::Tensor **made) {
  return guarded([&] {
    std::shared_ptr<void> kept(owner, drop);
    auto options = at::TensorOptions().dtype(like->scalar_type());
    *made = new at::Tensor(at::from_blob(data, like->sizes(), [kept](void *) {}, options));
  });
}

// Makes a tensor the parameter's gradient; null removes the gradient.
char *gradwire_set_gradient(const at::Tensor *parameter, const at::Tensor *gradient) {
  return guarded([&] {
    parameter->mutable_grad() = gradient == nullptr ? at::Tensor() : *gradient;
  });
}

// Whether there are no other references to this tensor or its memory.
bool gradwire_is_alone(const at::Tensor *tensor) {
  return tensor->use_count() == 1 && tensor->storage().use_count() == 1;
}
}
