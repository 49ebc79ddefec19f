# `make demo` shows the main job, `make test` passes every test; both set up all they need.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the fast tier compiles is taken to the lab VM, which is slow at it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## show what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.PHONY: venv
venv: $(VENV)/.installed ## the development environment, in .venv

.PHONY: lint
lint: venv ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: venv ## mypy --strict
	$(BIN)/mypy .

# For two processors: half of the tests' time is waits.
SIDE_BY_SIDE := -m pytest -q -n 4 --dist worksteal
.PHONY: fast
fast: venv ## the fast tier: no root, no LVM, no VM
	$(BIN)/python $(SIDE_BY_SIDE)

ROOMS ?=
.PHONY: quick
quick: venv ## the tests of the rooms that were edited, or of ROOMS="lvm agent/volumes"
	$(BIN)/ruff check -q .
	$(BIN)/python tests/quick.py $(ROOMS)

.PHONY: fast-every
fast-every: venv ## the fast tier, with the long cases that `make test` leaves out
	$(BIN)/python $(SIDE_BY_SIDE) --every

.PHONY: coverage
coverage: venv ## the fast tier, and what it does not reach
	$(BIN)/coverage erase
	$(BIN)/coverage run $(SIDE_BY_SIDE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

.PHONY: vm-tier
vm-tier: venv ## the VM tier: real LVM, real mounts, the installed service, reboots
	vagrant/lab.py during $(MAKE) --no-print-directory in-vm

# What `vm-tier` does while the machine is up. The contract tests bring their own services, groups and
# mounts, so three of them run at once, which leaves the guest's two processors no time to be idle.
# Sockets have short paths (unix(7)), hence --basetemp.
IN_GUEST := cd /carver && /opt/carver/test-venv/bin/python -m pytest -q --real --timeout 900
REPLAY := tests/callers/test_replay.py tests/callers/test_life_cycles.py
# lvm2 is spoken to as the service does it by default; `contract` has a process for each command.
CONTRACT := $(IN_GUEST) -n 3 --dist worksteal --durations=20 --basetemp=/tmp/t tests/contract $(REPLAY)
.PHONY: in-vm
in-vm:
	vagrant/lab.py run '$(CONTRACT) --sessions'
	vagrant/lab.py run '$(IN_GUEST) tests/vm'
	$(BIN)/python -m pytest -q tests/lab

.PHONY: contract
contract: venv ## the contract tests on real LVM, with the cases that `make test` takes for variations
	vagrant/lab.py during vagrant/lab.py run 'export CARVER_STATES=40; $(CONTRACT) --every'

.PHONY: vm-every
vm-every: venv ## the tests of the installed service, of failing disks and of the lab, all of them
	vagrant/lab.py during $(MAKE) --no-print-directory in-vm-every

# What `vm-every` does while the machine is up.
.PHONY: in-vm-every
in-vm-every:
	vagrant/lab.py run '$(IN_GUEST) tests/vm --every'
	$(BIN)/python -m pytest -q tests/lab --every

.PHONY: privileges
privileges: venv image ## each privilege of unit and pod, taken away in turn: what users need must fail
	vagrant/lab.py during $(MAKE) --no-print-directory in-vm-privileges

# What `privileges` does while the machine is up.
.PHONY: in-vm-privileges
in-vm-privileges:
	vagrant/lab.py run '$(IN_GUEST) tests/vm/test_privileges.py --every'
	$(BIN)/python -m pytest -q tests/container/test_privileges.py

.PHONY: callers
callers: venv ## every call that real callers were recorded to make, again, on real LVM
	vagrant/lab.py during vagrant/lab.py run '$(IN_GUEST) --sessions --basetemp=/tmp/t $(REPLAY) --every'

.PHONY: test
test: lint types fast vm-tier ## everything: lint, types, layers, the fast tier, the VM tier

.PHONY: modules
modules: venv ## write docs/modules.md anew: every module in one sentence
	$(BIN)/python tests/support/modules.py

.PHONY: reference
reference: venv ## write docs/chart.md anew from values.yaml, and the tables of what was tried
	$(BIN)/python tests/support/chart_values.py
	PYTHONPATH=tests $(BIN)/python -m cluster.record

.PHONY: proto
proto: venv ## generate the wire's Python modules anew
	$(BIN)/python proto/generate.py

.PHONY: manifests
manifests: venv ## render deploy/helm into deploy/kubernetes
	$(BIN)/python deploy/render.py

.PHONY: image
image: venv ## the container image, from Debian packages and wheels, into dist/; as root
	$(BIN)/python deploy/image/build_image.py

.PHONY: image-arm64
image-arm64: venv ## the image for arm64, its programs emulated by qemu; as root
	$(BIN)/python deploy/image/build_image.py --arch arm64

.PHONY: release
release: venv image ## what is given to users, with checksums and notes, into dist/release; as root
	$(BIN)/python deploy/release.py

.PHONY: deb
deb: venv ## a Debian package of the service, into dist/
	$(BIN)/python deploy/deb/build_package.py

.PHONY: lock
lock: ## resolve the newest versions and write constraints.txt
	rm -rf .cache/lock && $(PYTHON) -m venv .cache/lock
	.cache/lock/bin/pip install --quiet --editable '.[dev]'
	{ echo '# The exact versions that are tested and installed: `make lock` writes this file.'; \
	  .cache/lock/bin/pip freeze --all --exclude-editable --exclude pip; } > constraints.txt

.PHONY: demo
demo: ## the main job on real volumes, in the lab VM
	vagrant/lab.py demo

# BENCH='--quick', '--record', '--also "NAME:LINE"': docs/performance.md.
BENCH ?=
.PHONY: bench
bench: bench-controller ## what each call costs, beside the bare commands, in the lab VM
	vagrant/lab.py during $(BIN)/python tests/performance/run.py $(BENCH)

.PHONY: bench-controller
bench-controller: venv ## the controller before 1,000 simulated nodes, on this machine
	$(BIN)/python tests/performance/controller.py $(filter --quick --record,$(BENCH))

.PHONY: pictures
pictures: ## docs/images, from what the commands show in the lab VM
	vagrant/lab.py pictures

.PHONY: tools
tools: venv ## helm and csi-sanity, which `make conformance` compiles where they are not there
	$(BIN)/python deploy/render.py --check
	$(BIN)/python tests/conformance/run.py --build

.PHONY: chart
chart: venv ## the chart by every value
	$(BIN)/python deploy/render.py --check
	$(BIN)/python $(SIDE_BY_SIDE) tests/chart

.PHONY: monitoring
monitoring: venv ## alerts and dashboard, by the real Prometheus
	$(BIN)/python tests/prometheus/programs.py
	$(BIN)/python $(SIDE_BY_SIDE) tests/prometheus

.PHONY: conformance
conformance: chart monitoring image ## chart, alerts and dashboard; csi-sanity and the image, in the lab VM
	vagrant/lab.py during $(MAKE) --no-print-directory in-vm-conformance EVERY=--every

# What `conformance` does while the machine is up; without EVERY, CI's cases.
.PHONY: in-vm-conformance
in-vm-conformance:
	$(BIN)/python tests/conformance/run.py
	$(BIN)/python -m pytest -q tests/container/test_life_cycle.py $(EVERY)

.PHONY: faults
faults: venv ## what can go wrong: kills, power losses, disks, lvm2; one table, in the lab VM
	vagrant/lab.py during $(BIN)/python tests/faults/run.py

.PHONY: load
load: venv ## 200 volumes by 8 clients: times of calls, and what they cost the service
	vagrant/lab.py during vagrant/lab.py run 'cd /carver && PYTHONPATH=.:tests:tests/support /opt/carver/test-venv/bin/python tests/load/run.py'

.PHONY: upgrade
upgrade: venv ## volumes of each kind that one version made, served by another, both ways
	vagrant/lab.py during tests/upgrade/run.py

# CARVER_CLUSTER_NODES, CARVER_CLUSTER_KUBERNETES: docs/testing.md.
.PHONY: cluster
cluster: venv ## a Kubernetes cluster of the lab's machines, with Carver in it; 3 nodes
	$(BIN)/python vagrant/cluster.py up

# CHECKS='--record', '--only NAME'; without a name every check, and Kubernetes' own storage tests. Exit
# code 3 is that of checks that all passed, but for what the cluster lacks.
CHECKS ?=
.PHONY: cluster-test
cluster-test: venv ## in that cluster: our checks, those that want a lab too, and Kubernetes' own tests
	$(BIN)/python vagrant/cluster.py check --lab $(CHECKS) || [ $$? = 3 ]
	$(if $(findstring --only,$(CHECKS))$(findstring --clean,$(CHECKS)),,$(BIN)/python tests/cluster/e2e.py $(filter --record,$(CHECKS)))

.PHONY: cluster-down
cluster-down: venv ## remove the cluster; its programs and the box stay cached
	$(BIN)/python vagrant/cluster.py down

.PHONY: vm
vm: ## the lab VM, up and with the present tree installed (docs/testing.md)
	vagrant/lab.py up

.PHONY: vm-ssh
vm-ssh: ## a root shell in the lab VM
	vagrant/lab.py ssh

.PHONY: vm-down
vm-down: ## remove the lab VM; its box stays cached
	vagrant/lab.py down
