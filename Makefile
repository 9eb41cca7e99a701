# Two commands on a fresh clone: `make demo` and `make test`. Both see to what they need first (tools/prepare).

# cargo may lie beside the PATH: rustup's, or one of several that Ubuntu keeps.
WITH_CARGO = PATH="$$(tools/prepare --cargo):$$PATH"

.PHONY: help demo test test-xen build install prepare clean

help:
	@echo 'make demo      a Linux guest on a Tapline disk: filesystem, fio, fstrim, snapshot, kill -9; about 3 minutes'
	@echo 'make test      the whole gate: format, clippy, tidy, tests, crash exploration, a guest'
	@echo 'make test-xen  all tests on real Xen under QEMU: dom0, guests, their disks; 40 minutes or so'
	@echo 'make build     target/release/tapline and target/release/tapline-disk'
	@echo 'make install   build, then copy both to $(PREFIX)/bin, and the manual pages'
	@echo 'make prepare   install what the others need (packages and, if need be, cargo)'
	@echo
	@echo 'TAPLINE_NO_INSTALL=1       install nothing, say what is missing'
	@echo 'TAPLINE_INSTALL_RUSTUP=1   where no package of cargo is new enough, install rustup without asking'

demo: prepare
	@$(WITH_CARGO) cargo xtask demo

test: prepare
	@$(WITH_CARGO) tools/gate

test-xen: prepare
	@$(WITH_CARGO) cargo xtask xen-test

build: prepare
	@$(WITH_CARGO) cargo build --release --package tapline --package tapline-disk
	@ls -l target/release/tapline target/release/tapline-disk

PREFIX ?= /usr/local

install: build
	install -D -t $(DESTDIR)$(PREFIX)/bin target/release/tapline target/release/tapline-disk
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/man/man1 docs/man/*.1

prepare:
	@tools/prepare

clean:
	@$(WITH_CARGO) cargo clean
