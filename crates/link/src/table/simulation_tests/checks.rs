//! What must hold after each step of the simulation.

use super::*;

impl World<'_> {
    /// Checks the session that a step has touched: its path is one of its process's links, and its windows are kept.
    pub(super) fn check_session(&self, process: usize, id: SessionId) {
        let Some(session) = self.tables[process].session(id) else { return };
        let inner = session.lock();
        let state = &inner.state;
        let (phase, path) = (state.phase(), state.path());
        assert_eq!(inner.link.as_ref().map(|link| link.id), path, "the path is one");
        match phase {
            Phase::Open | Phase::Resuming | Phase::Closing => {
                assert!(path.is_some(), "{phase:?} has no path")
            }
            Phase::Parked | Phase::Closed => assert!(path.is_none(), "{phase:?} has path {path:?}"),
            Phase::Opening | Phase::Accepting | Phase::LastAck => {}
        }
        if let Some(path) = path {
            let ends = self.lines.iter().enumerate().flat_map(|(at, line)| {
                line.ends.iter().enumerate().map(move |(side, end)| (LINES[at][side], end))
            });
            let mut ends = ends.filter(|(_, end)| end.link.id == path);
            assert!(ends.any(|(at, end)| at == process && !end.over), "link {path} of {phase:?} is over");
        }
        assert!(state.recv.queued() as u64 <= WINDOWS.max, "{} bytes are queued", state.recv.queued());
        let Some(pair) = self.places.get(&id).map(|at| &self.pairs[*at]) else { return };
        let is_newer =
            if state.is_opener() { state.epoch() >= pair.epoch } else { state.epoch() <= pair.epoch };
        assert!(is_newer, "epoch {} of {}", state.epoch(), pair.describe());
    }

    /// Checks a frame that a process sends: a session's own frames go over its path only, and each attempt has a higher
    /// epoch than the last.
    pub(super) fn check_sent(&mut self, process: usize, link: LinkId, frame: &Frame) {
        let FrameKind::Session(id, _, body) = &frame.body else { return };
        if let SessionFrame::Data(_) | SessionFrame::Fin { .. } | SessionFrame::Credit { .. } = body
            && let Some(session) = self.tables[process].session(*id)
        {
            let path = session.read(SessionState::path);
            assert!(path.is_none_or(|path| path == link), "{} over link {link}, not {path:?}", body.name());
        }
        let Some(at) = self.places.get(id) else { return };
        let pair = &mut self.pairs[*at];
        if let SessionFrame::Open { epoch, .. } | SessionFrame::Resume { epoch, .. } = body
            && process == pair.server
        {
            assert!(*epoch > pair.epoch, "{}: epoch {epoch} again", pair.describe());
            pair.epoch = *epoch;
        }
    }

    /// Checks that budgets hold, but for what each session may exceed them by.
    pub(super) fn check_memory(&self) {
        let pieces = self.memory / (JOINED / 2) + 2 * SESSIONS;
        for (process, table) in self.tables.iter().enumerate() {
            let (promised, kept) = table.memory();
            assert!(promised <= self.memory + pieces * PIECE, "process {process} promised {promised}");
            assert!(kept <= self.memory + table.len() * MAX_FAIR, "process {process} keeps {kept}");
            let relayed = table.relays.queued.used();
            assert!(relayed <= self.memory, "process {process} queues {relayed} relayed bytes");
        }
    }

    /// Checks a link that ends: its list has exactly the sessions whose path it is, and what is queued was reserved.
    pub(super) fn check_link(&self, process: usize, link: &Link) {
        let table = &self.tables[process];
        let mut own = link.own(None);
        let on_path = |session: &Arc<SharedSession>| session.read(SessionState::path) == Some(link.id);
        let mut known: Vec<_> =
            table.all().into_iter().filter(on_path).map(|session| session.key.id).collect();
        own.sort_unstable();
        known.sort_unstable();
        assert_eq!(own, known, "the sessions of link {}", link.id);
        assert!(table.queued() <= table.memory().0);
    }
}

impl Pair {
    /// Checks bytes that an owner has read, or its end of stream.
    pub(super) fn check_read(&mut self, at: usize, side: usize, bytes: &Bytes) {
        let (written, finished) = (self.sides[1 - side].written, self.sides[1 - side].finished);
        let me = &mut self.sides[side];
        assert!(!me.ended, "bytes after the end of stream");
        if bytes.is_empty() {
            me.ended = true;
            assert!(finished && me.read == written, "{}: ends too early", self.describe());
            return;
        }
        let right = content(at, 1 - side, me.read, bytes.len()) == bytes;
        me.read += bytes.len() as u64;
        assert!(right && me.read <= written, "{}: wrong bytes", self.describe());
    }

    /// Checks an error of an owner: somebody has abandoned the session, or a limit. What was written before its end was
    /// broken off has arrived.
    pub(super) fn check_broken(&mut self, side: usize, why: Option<&SessionError>) {
        let code = why.map(|why| why.code);
        let excused = self.excused || code == Some(ErrorCode::Overloaded);
        assert!(excused && code != Some(ErrorCode::ProtocolError), "{}: {why:?}", self.describe());
        let [me, other] = [&self.sides[side], &self.sides[1 - side]];
        let complete = !other.broke || code == Some(ErrorCode::Overloaded) || me.read == other.written;
        assert!(complete, "{}: bytes before the abort are missing", self.describe());
        self.excused = true;
    }

    /// Returns true if both owners have left.
    pub(super) fn is_over(&self) -> bool {
        self.owners.iter().all(|owner| matches!(owner, Owner::None))
    }

    pub(super) fn is_complete(&self) -> bool {
        self.sides.iter().all(|side| side.finished && side.ended)
    }

    pub(super) fn describe(&self) -> String {
        let owner = |owner: &Owner| match owner {
            Owner::Opening(_) => "opening",
            Owner::Dialling(_) => "dialling",
            Owner::Open(_) => "open",
            Owner::None => "gone",
        };
        let [a, b] = [0, 1].map(|side| {
            let Side { size, written, finished, read, ended, broke, .. } = &self.sides[side];
            let owner = owner(&self.owners[side]);
            format!("{owner}, wrote {written} of {size} ({finished}, {broke}), read {read} ({ended})")
        });
        format!("session of server {}, epoch {}, excused {}: {a}; {b}", self.server, self.epoch, self.excused)
    }
}
