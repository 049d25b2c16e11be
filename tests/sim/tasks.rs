//! Tasks that run in any order, and only after their waker was called, so that a lost wake-up stays lost.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

type Work = Pin<Box<dyn Future<Output = ()>>>;

/// The tasks of a run.
#[derive(Default)]
pub(crate) struct TaskSet {
    tasks: BTreeMap<usize, Task>,
    ready: Ready,
    next: usize,
    spawned: TaskSpawner,
}

/// A spawner for the running tasks of one process.
#[derive(Clone, Default)]
pub(crate) struct TaskSpawner {
    spawned: Rc<RefCell<Vec<(usize, String, Work)>>>,
    process: usize,
}

type Ready = Arc<Mutex<BTreeSet<usize>>>;

struct Task {
    process: usize,
    name: String,
    work: Work,
    waker: Waker,
}

struct Flag {
    task: usize,
    ready: Ready,
}

/// A flag that is set when its waker is called.
#[derive(Default)]
pub(crate) struct WakeFlag(AtomicBool);

impl TaskSet {
    pub(crate) fn spawner(&self, process: usize) -> TaskSpawner {
        TaskSpawner { process, ..self.spawned.clone() }
    }

    /// Returns the number of runnable tasks.
    pub(crate) fn ready(&mut self) -> usize {
        for (process, name, work) in self.spawned.spawned.take() {
            let flag = Arc::new(Flag { task: self.next, ready: self.ready.clone() });
            flag.wake_by_ref();
            self.tasks.insert(self.next, Task { process, name, work, waker: flag.into() });
            self.next += 1;
        }
        self.ready.lock().unwrap().len()
    }

    /// Runs the `nth` runnable task and returns its name.
    pub(crate) fn run(&mut self, nth: usize) -> String {
        let id = {
            let mut ready = self.ready.lock().unwrap();
            let id = *ready.iter().nth(nth).unwrap();
            ready.remove(&id);
            id
        };
        let Some(task) = self.tasks.get_mut(&id) else { return "finished task".into() };
        let name = task.name.clone();
        if task.work.as_mut().poll(&mut Context::from_waker(&task.waker)).is_ready() {
            self.tasks.remove(&id);
        }
        name
    }

    /// Drops all tasks of a process.
    pub(crate) fn kill(&mut self, process: usize) {
        self.ready();
        self.tasks.retain(|_, task| task.process != process);
    }

    /// Returns the names of unfinished tasks.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.tasks.values().map(|task| task.name.as_str()).collect()
    }
}

impl TaskSpawner {
    pub(crate) fn spawn(&self, name: String, work: impl Future<Output = ()> + 'static) {
        self.spawned.borrow_mut().push((self.process, name, Box::pin(work)));
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.lock().unwrap().insert(self.task);
    }
}

impl WakeFlag {
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Relaxed)
    }

    pub(crate) fn is(&self) -> bool {
        self.0.load(Relaxed)
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}
