//! Which I/O engine carries a disk: the one that was named, or the one that suits the files. What was not asked
//! for is reported, never silent.

use uring::{Cache, EngineKind, ImageFile};

/// An engine, and what there is to say about the choice.
pub struct Choice {
    /// The engine.
    pub kind: EngineKind,
    /// A line for people.
    pub note: Option<String>,
}

/// What matters about the files of a chain.
#[derive(Clone, Copy, Debug, Default)]
struct Files<'a> {
    /// One on which io_uring needs a thread for every request.
    slow: Option<&'a ImageFile>,
    /// Whether one is open through the page cache, where Linux AIO blocks.
    cached: bool,
}

/// Chooses for `files`. A named engine is taken as it is.
pub fn choose(named: Option<EngineKind>, files: &[ImageFile]) -> Choice {
    let seen = Files {
        slow: files.iter().find(|file| file.uring_needs_workers()),
        cached: files.iter().any(|file| file.options().cache == Cache::Writeback),
    };
    let path = seen.slow.map(|file| file.path().display().to_string());
    decide(named, path.as_deref(), seen.cached)
}

fn decide(named: Option<EngineKind>, slow: Option<&str>, cached: bool) -> Choice {
    let (kind, note) = match (named, slow) {
        (Some(EngineKind::Aio), _) | (_, None) => (named.unwrap_or(EngineKind::Uring), None),
        (None, Some(path)) if !cached => {
            let note = format!(
                "Linux AIO is used: on the file system of {path}, io_uring would need a kernel thread for every \
                 request (--io-engine uring overrides this)"
            );
            (EngineKind::Aio, Some(note))
        }
        (_, Some(path)) => {
            let note = format!(
                "io_uring is used, although the file system of {path} makes it need a kernel thread for every request"
            );
            (EngineKind::Uring, Some(note))
        }
    };
    Choice { kind, note }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn io_uring_is_the_default_and_says_nothing() {
        let choice = decide(None, None, false);
        assert_eq!((choice.kind, choice.note), (EngineKind::Uring, None));
    }

    #[test]
    fn where_io_uring_is_slow_aio_is_chosen_and_reported() {
        let choice = decide(None, Some("/dev/shm/a"), false);
        assert_eq!(choice.kind, EngineKind::Aio);
        assert!(choice.note.unwrap().contains("/dev/shm/a"));
    }

    #[test]
    fn a_named_engine_is_obeyed_with_a_word_of_warning() {
        let choice = decide(Some(EngineKind::Uring), Some("/dev/shm/a"), false);
        assert_eq!(choice.kind, EngineKind::Uring);
        assert!(choice.note.is_some());
        assert_eq!(decide(Some(EngineKind::Aio), Some("/dev/shm/a"), true).kind, EngineKind::Aio);
    }

    #[test]
    fn aio_is_never_chosen_for_files_in_the_page_cache() {
        assert_eq!(decide(None, Some("/dev/shm/a"), true).kind, EngineKind::Uring);
    }
}
