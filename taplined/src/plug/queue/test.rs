//! Invariants checked: those in the queue's module documentation, after every step, against a model of two lists.

use fastrand::Rng;

use super::*;

const WINDOW: u32 = 2;
const WORKERS: u32 = 3;
const MEMORY: u64 = 4;

fn limits() -> Limits {
    Limits { plug_window: WINDOW, worker_pool_size: WORKERS, worker_memory: MEMORY }
}

fn uuid(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn request(vm: Option<u128>, vbd: u128, mode: Mode, memory: u64) -> Request {
    Request { vbd: uuid(vbd), vm: vm.map(uuid), mode, memory }
}

/// The expected behaviour of a queue, as two lists and the observed starts.
struct Model {
    queue: Queue,
    waiting: Vec<(Ticket, Request)>,
    under_way: Vec<(Ticket, Request)>,
}

impl Model {
    fn new(limits: Limits) -> Model {
        Model { queue: Queue::new(limits), waiting: Vec::new(), under_way: Vec::new() }
    }

    fn add(&mut self, request: Request) {
        let ticket = self.queue.add(request);
        self.waiting.push((ticket, request));
    }

    /// Starts all requests that may start, and checks each and the rest.
    fn settle(&mut self) -> Vec<Uuid> {
        let mut begun = Vec::new();
        while let Some(ticket) = self.queue.next() {
            let at = self.waiting.iter().position(|(waiting, _)| *waiting == ticket).expect("it waited");
            let (_, request) = self.waiting.remove(at);
            self.check_order(at, request);
            self.under_way.push((ticket, request));
            self.check_bounds();
            begun.push(request.vbd);
        }
        self.check_nothing_idle();
        begun
    }

    fn end(&mut self, at: usize) {
        let (ticket, _) = self.under_way.remove(at);
        self.queue.end(ticket);
    }

    fn cancel(&mut self, at: usize) {
        let (ticket, _) = self.waiting.remove(at);
        self.queue.end(ticket);
    }

    fn limits(&self) -> Limits {
        self.queue.limits
    }

    fn memory(&self) -> u64 {
        self.under_way.iter().map(|(_, request)| request.memory.max(1).min(self.limits().worker_memory)).sum()
    }

    fn of_vm(&self, vm: Option<Uuid>) -> usize {
        self.under_way.iter().filter(|(_, other)| other.vm == vm).count()
    }

    fn is_busy(&self, vbd: Uuid) -> bool {
        self.under_way.iter().any(|(_, other)| other.vbd == vbd)
    }

    fn check_bounds(&self) {
        let limits = self.limits();
        assert!(self.under_way.len() <= limits.worker_pool_size as usize);
        assert!(self.memory() <= limits.worker_memory);
        for (_, request) in &self.under_way {
            assert!(request.vm.is_none() || self.of_vm(request.vm) <= limits.plug_window as usize);
            assert_eq!(self.under_way.iter().filter(|(_, other)| other.vbd == request.vbd).count(), 1);
            assert!(request.memory <= limits.worker_memory || self.under_way.len() == 1, "a large one runs alone");
        }
    }

    /// No request of the same VM that could have been started may come before `request`, which was at position `at` of
    /// the waiting ones.
    fn check_order(&self, at: usize, request: Request) {
        for (place, (_, other)) in self.waiting.iter().enumerate() {
            let before = match (other.mode, request.mode) {
                (Mode::ReadWrite, Mode::ReadOnly) => true,
                (one, another) => one == another && place < at,
            };
            let free = !self.is_busy(other.vbd) && other.vbd != request.vbd;
            assert!(other.vm != request.vm || !before || !free, "{other:?} comes before {request:?}");
        }
    }

    /// If a request could start, it must be memory alone, or an overtaken request, that prevents it.
    fn check_nothing_idle(&self) {
        let limits = self.limits();
        if self.under_way.len() >= limits.worker_pool_size as usize {
            return;
        }
        let could = self.waiting.iter().filter(|(_, request)| {
            !self.is_busy(request.vbd) && (request.vm.is_none() || self.of_vm(request.vm) < limits.plug_window as usize)
        });
        let mut could = could.peekable();
        if could.peek().is_some() {
            let wants = |memory: u64| memory.max(1).min(limits.worker_memory) + self.memory() > limits.worker_memory;
            assert!(could.any(|(_, request)| wants(request.memory)), "something waits for nothing");
        }
    }
}

/// The number of actions in a small case.
const KINDS: usize = 8;

fn apply(model: &mut Model, kind: usize, number: u128) {
    let (one, other) = (Some(1), Some(2));
    match kind {
        0 => model.add(request(one, number, Mode::ReadWrite, 1)),
        1 => model.add(request(one, number, Mode::ReadOnly, 1)),
        2 => model.add(request(other, number, Mode::ReadWrite, 3)),
        3 => model.add(request(None, number, Mode::ReadWrite, 2)),
        // The same VBD again, and a request that exceeds all memory.
        4 => model.add(request(one, 1000, Mode::ReadWrite, 1)),
        5 => model.add(request(other, number, Mode::ReadOnly, 9)),
        6 if !model.under_way.is_empty() => model.end(0),
        7 if !model.waiting.is_empty() => model.cancel(model.waiting.len() - 1),
        _ => {}
    }
}

/// Ends all requests in order: every request must get its turn.
fn drain(model: &mut Model) {
    model.settle();
    while !model.under_way.is_empty() {
        model.end(0);
        model.settle();
    }
    assert!(model.waiting.is_empty(), "{} wait for ever", model.waiting.len());
    assert!(model.queue.machines.is_empty() && model.queue.turns.is_empty() && model.queue.busy.is_empty());
    assert_eq!(model.queue.memory, 0);
}

/// Exhaustive: all sequences of six of eight actions: 262,144.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn every_short_sequence_keeps_the_rules() {
    const LEN: u32 = 6;
    for case in 0..KINDS.pow(LEN) {
        let mut model = Model::new(limits());
        let mut rest = case;
        for number in 0..LEN {
            apply(&mut model, rest % KINDS, number.into());
            rest /= KINDS;
            model.settle();
        }
        drain(&mut model);
    }
}

#[test]
fn long_random_sequences_keep_the_rules() {
    for seed in 0..200 {
        println!("seed {seed}");
        let mut random = Rng::with_seed(seed);
        let limits = Limits {
            plug_window: random.u32(1..=4),
            worker_pool_size: random.u32(1..=6),
            worker_memory: random.u64(1..=20),
        };
        let mut model = Model::new(limits);
        for _ in 0..400 {
            match random.u64(..10) {
                0..5 => {
                    let vm = Some(random.u128(..4)).filter(|vm| *vm > 0);
                    // A VBD has one VM and one mode.
                    let vbd = random.u128(..12) * 4 + vm.unwrap_or(0);
                    let mode = if vbd % 8 < 4 { Mode::ReadWrite } else { Mode::ReadOnly };
                    model.add(request(vm, vbd, mode, random.u64(..12)));
                }
                5..9 if !model.under_way.is_empty() => {
                    let at = random.usize(..model.under_way.len());
                    model.end(at);
                }
                9 if !model.waiting.is_empty() => {
                    let at = random.usize(..model.waiting.len());
                    model.cancel(at);
                }
                _ => {}
            }
            model.settle();
        }
        drain(&mut model);
    }
}

#[test]
fn the_window_slides_and_a_slow_request_delays_only_itself() {
    let mut model = Model::new(Limits { plug_window: 10, worker_pool_size: 32, worker_memory: 1000 });
    (0..50).for_each(|number| model.add(request(Some(1), number, Mode::ReadWrite, 1)));
    assert_eq!(model.settle().len(), 10);
    // The first never ends; each of the others that does lets in the next at once.
    for begun in 10..50 {
        model.end(1);
        assert_eq!(model.settle(), [uuid(begun)]);
    }
}

#[test]
fn machines_take_turns() {
    let mut model = Model::new(Limits { plug_window: 10, worker_pool_size: 1, worker_memory: 1000 });
    (0..255).for_each(|number| model.add(request(Some(1), number, Mode::ReadWrite, 1)));
    model.settle();
    model.add(request(Some(2), 900, Mode::ReadOnly, 1));
    model.end(0);
    // Its turn comes after the one that waited before it.
    model.settle();
    model.end(0);
    assert_eq!(model.settle(), [uuid(900)]);
}

#[test]
fn writers_come_before_readers_that_came_first() {
    let mut model = Model::new(Limits { plug_window: 1, worker_pool_size: 1, worker_memory: 1000 });
    model.add(request(Some(1), 0, Mode::ReadOnly, 1));
    model.settle();
    model.add(request(Some(1), 1, Mode::ReadOnly, 1));
    model.add(request(Some(1), 2, Mode::ReadWrite, 1));
    model.end(0);
    assert_eq!(model.settle(), [uuid(2)]);
}

#[test]
fn a_request_waiting_for_memory_is_overtaken_a_limited_number_of_times() {
    let mut model = Model::new(Limits { plug_window: 10, worker_pool_size: 10, worker_memory: 10 });
    model.add(request(Some(1), 0, Mode::ReadWrite, 5));
    model.settle();
    model.add(request(Some(2), 1, Mode::ReadWrite, 10));
    // An endless series of small requests of another VM, with one slow request.
    let mut passed = 0;
    for number in 2..100 {
        model.add(request(Some(3), number, Mode::ReadWrite, 1));
        passed += model.settle().len();
        while model.under_way.len() > 1 {
            model.end(1);
        }
        passed += model.settle().len();
    }
    assert_eq!(passed, PASSED_MAX as usize);
    while !model.under_way.is_empty() {
        model.end(0);
    }
    assert_eq!(model.settle(), [uuid(1)]);
}
