# The two commands that matter are `make demo` and `make test`; the rest is for those who work on
# Gradwire itself.

CARGO ?= cargo
# Where nextest is installed it runs the tests, side by side and each with a time limit.
NEXTEST := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo yes)
TORCH := torch=$$(scripts/libtorch.sh) && eval "$$torch" &&
DEMO_HOSTS ?= 127.0.0.1:2,127.0.0.2:2
DEMO_ARGS ?=

.PHONY: demo test test-rust bench lint doc loom soak clean

demo: ## train a small network on four ranks of two nodes, all on this machine
	$(TORCH) $(CARGO) build --release -p gradwire-cli -p gradwire-daemon --bins
	$(TORCH) $(CARGO) build --release -p gradwire-worker --features tch --example digits
	$(TORCH) target/release/gradwire run -np 4 -H $(DEMO_HOSTS) -- target/release/examples/digits $(DEMO_ARGS)

test: ## every test, on a fresh machine too
	$(TORCH) $(CARGO) build --workspace --bins
	$(TORCH) $(CARGO) build -p gradwire-worker --features tch --examples
ifeq ($(NEXTEST),yes)
	$(TORCH) $(CARGO) nextest run --workspace
else
	$(TORCH) $(CARGO) test --workspace
endif

lint: ## what CI wants besides the tests
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(TORCH) $(CARGO) clippy -p gradwire-worker --features tch --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

clean: ## everything that was built or fetched here
	$(CARGO) clean
	rm -rf .venv
