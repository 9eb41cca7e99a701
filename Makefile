# Two commands on a fresh clone: `make demo` and `make test`. Both see to what they need first (tools/prepare).

NAMES = tapline taplined tapline-disk tapline-backup

# cargo may lie beside the PATH: rustup's, or one of several that Ubuntu keeps.
WITH_CARGO = PATH="$$(tools/prepare --path)"

# State for incremental builds takes more space than all the rest of target/, and helps only those who change something.
# Where there is some already, a build without it would begin from nothing.
ifeq ($(wildcard target/debug/incremental/*),)
export CARGO_INCREMENTAL = 0
endif

# Where `make install` prepares what it copies.
STAGE = target/stage

.PHONY: help book demo test test-all test-long test-xen test-shares build install install-files uninstall deb rpm prepare clean

help:
	@echo 'make demo      a Linux guest on a Tapline disk: filesystem, fio, fstrim, snapshot, kill -9; 8 minutes at first, then 3'
	@echo 'make test      the gate before each commit: tests, crash exploration, planted bugs, a guest, Xen; 20 minutes'
	@echo 'make test-all  the same and the slow tests, clippy, longer explorations, more guests; an hour'
	@echo 'make test-long the same and what takes hours: deeper explorations, test-xen, test-shares, xfstests'
	@echo 'make test-xen  all tests on real Xen under QEMU: dom0, guests, their disks; 40 minutes or so'
	@echo 'make test-shares  repositories on servers of NFS and SMB, disks on thin volumes, in a guest; 25 minutes or so'
	@echo 'make build     tapline, taplined, tapline-disk and tapline-backup in target/built'
	@echo 'make install   build, then copy them to $(PREFIX)/bin, with manual pages, completions and systemd units; where the'
	@echo '               daemon runs, start it again and upgrade its disks under their guests'
	@echo 'make uninstall remove what make install has put there; settings, the catalogue and disks stay'
	@echo 'make deb       a package for Debian and Ubuntu in target/package; make rpm: for Fedora, openSUSE and the like'
	@echo 'make prepare   install what the others need (packages and, if need be, cargo)'
	@echo 'make book      the manual as a website in target/book; needs mdbook'
	@echo
	@echo 'TAPLINE_NO_UPGRADE=1       with make install: leave a daemon that runs, and its disks, at the old program'
	@echo 'TAPLINE_NO_INSTALL=1       install nothing, say what is missing'
	@echo 'TAPLINE_INSTALL_RUSTUP=1   where no package of cargo is new enough, install rustup without asking'

# All in one run of cargo, which compiles each crate once; `make test` finds it compiled. The demo makes no backups.
demo:
	@tools/prepare demo
	@echo 'demo: compiling takes about 5 minutes on 2 cores, once; the demo itself 3 minutes, in a guest that QEMU emulates'
	@$(WITH_CARGO) cargo build --bin demo $(addprefix --bin ,$(filter-out tapline-backup,$(NAMES)))
	@target/debug/demo --bin-dir target/debug

test: prepare
	@echo 'test: 20 minutes on 2 cores from a fresh clone, of which compiling takes 9'
	@$(WITH_CARGO) tools/gate

test-all: prepare
	@$(WITH_CARGO) tools/gate all

test-long: prepare
	@$(WITH_CARGO) tools/gate long

test-xen: prepare
	@$(WITH_CARGO) cargo xtask xen-test

test-shares: prepare
	@$(WITH_CARGO) cargo xtask share-test

# Where the programs are that are installed.
BUILT ?= target/built
PROGRAMS = $(addprefix $(BUILT)/,$(NAMES))

# The data path is optimized as a whole; of the others that would take ten minutes, and show nowhere.
build:
	@tools/prepare build
	@$(WITH_CARGO) cargo build --release --bin tapline --bin taplined --bin tapline-backup
	@$(WITH_CARGO) cargo build --profile dist --bin tapline-disk
	@install -D -t $(BUILT) target/release/tapline target/release/taplined target/release/tapline-backup \
	    target/dist/tapline-disk
	@ls -l $(PROGRAMS)

PREFIX ?= /usr/local
SHARE = $(DESTDIR)$(PREFIX)/share
UNITS = $(DESTDIR)$(PREFIX)/lib/systemd/system

# On a host on which Tapline does not run nothing is enabled or started: systemctl enable --now taplined. Where it runs, the
# daemon is started again and disks get new processes, under guests that continue (tools/upgrade-running).
install: build
	@if [ -n '$(DESTDIR)' ]; then $(MAKE) --no-print-directory install-files; else \
	    rm -rf $(STAGE) && $(MAKE) --no-print-directory --silent install-files DESTDIR=$(STAGE) && \
	    tools/installed put $(STAGE) $(PREFIX) && rm -rf $(STAGE) && tools/upgrade-running $(PREFIX)/bin; fi

uninstall:
	@tools/installed remove $(PREFIX)

# Pages for users, which manual pages and messages refer to; not those about the project itself.
PAGES = $(filter-out docs/csi.md docs/proxmox.md docs/testing.md docs/README.md docs/SUMMARY.md,$(wildcard docs/*.md))

# What is installed and where, from programs that are built: packages have the same files.
install-files:
	install -D -t $(DESTDIR)$(PREFIX)/bin $(PROGRAMS)
	for section in 1 5 7 8; do install -D -m 644 -t $(SHARE)/man/man$$section docs/man/*.$$section || exit; done
	install -D -m 644 -t $(SHARE)/doc/tapline docs/taplined.toml docs/openapi.json $(PAGES)
	install -D -m 644 -t $(SHARE)/doc/tapline/tasks docs/tasks/*.md
	install -D -t $(SHARE)/tapline/guest packaging/guest/tapline-guest
	install -D -m 644 -t $(SHARE)/tapline/guest packaging/guest/tapline-guest.service packaging/guest/tapline-guest.openrc
	install -D -m 644 packaging/libvirt/apparmor $(DESTDIR)/etc/apparmor.d/abstractions/libvirt-qemu.d/tapline
	install -D -m 644 -t $(SHARE)/tapline/libvirt packaging/libvirt/apparmor packaging/libvirt/tapline.cil
	sed 's#/usr/local/#$(PREFIX)/#' packaging/libvirt/hook >$(SHARE)/tapline/libvirt/hook
	chmod 755 $(SHARE)/tapline/libvirt/hook
	install -d $(UNITS) $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions $(SHARE)/fish/vendor_completions.d
	for unit in taplined tapline-drain tapline-upgrade; do \
	    sed 's#/usr/local/bin/#$(PREFIX)/bin/#' packaging/$$unit.service >$(UNITS)/$$unit.service && \
	    chmod 644 $(UNITS)/$$unit.service || exit; \
	done
	$(BUILT)/tapline completion bash >$(SHARE)/bash-completion/completions/tapline
	$(BUILT)/tapline completion zsh >$(SHARE)/zsh/site-functions/_tapline
	$(BUILT)/tapline completion fish >$(SHARE)/fish/vendor_completions.d/tapline.fish

deb: build
	@tools/package deb $(BUILT)

rpm: build
	@tools/package rpm $(BUILT)

# Pages and links are checked by `cargo xtask tidy`, which needs no mdbook.
book:
	@command -v mdbook >/dev/null || { echo 'book: there is no mdbook: cargo install --locked mdbook'; exit 1; }
	@mdbook build docs && echo 'book: open target/book/index.html'

prepare:
	@tools/prepare test

clean:
	@$(WITH_CARGO) cargo clean
