//! A process that does a part of a task, and ends with it.
//!
//! It knows nothing about the program. Invariant: the process counts as running for its task until it is reaped: until
//! then it may write, and has its files locked.

use std::process::ExitStatus;

use api::Problem;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::Child;
use tokio::runtime::Handle;

use super::started::Running;

/// Maximum bytes of a process's result; the longest is the map of a disk.
const OUTPUT_MAX: u64 = 64 << 20;
/// Bytes of its other output that are kept, and the maximum length of a line.
const WORDS_MAX: usize = 16 << 10;
const LINE_MAX: u64 = 4096;

/// A process. Dropping it kills the process.
#[derive(Debug)]
pub struct TaskProcess(Option<(Child, Running)>);

/// What a process has left when it has ended.
#[derive(Debug)]
pub struct Output {
    /// Its standard output.
    pub stdout: String,
    /// Its standard error, without lines that the caller has taken.
    pub words: String,
    /// How it has ended.
    pub status: ExitStatus,
}

impl TaskProcess {
    /// A process that the current task has started.
    pub fn of(child: Child) -> TaskProcess {
        TaskProcess(Some((child, Running::begin())))
    }

    /// Its pid, while it runs.
    pub fn id(&self) -> Option<u32> {
        self.0.as_ref().and_then(|(child, _)| child.id())
    }

    /// Waits for its exit. `on_line` is called with each line of its standard error, and returns whether it takes it.
    /// The caller must have taken the standard input, if that is a pipe: it would be closed.
    pub async fn ended(mut self, on_line: impl FnMut(&[u8]) -> bool) -> Result<Output, Problem> {
        let Some((child, _)) = &mut self.0 else { return Err(Problem::failed("wait for a process", "there is none")) };
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (stdout, words) = tokio::join!(read(stdout), read_words(stderr, on_line));
        let failed = |error| Problem::failed("read from a process", error);
        let (stdout, words) = (stdout.map_err(failed)?, words.map_err(failed)?);
        let status = child.wait().await.map_err(|error| Problem::failed("wait for a process", error))?;
        self.0 = None;
        Ok(Output { stdout, words, status })
    }

    /// Runs `work`, which needs this process, and then ends the process by SIGTERM. An error if the process ends
    /// before, or badly; `tried` is reported then.
    pub async fn during<T>(self, tried: &str, work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
        let pid = self.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let ended = self.ended(|_| false);
        tokio::pin!(ended);
        let badly =
            |Output { words, status, .. }| Problem::failed(tried, format!("its process has ended ({status}): {words}"));
        let done = tokio::select! {
            biased;
            output = &mut ended => return Err(badly(output?)),
            done = work => done?,
        };
        // It is reaped by `ended` only, so the number is still its own.
        if let Some(Err(errno)) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
            tracing::debug!(%errno, "a process that is to end has ended");
        }
        let output = ended.await?;
        if output.status.success() { Ok(done) } else { Err(badly(output)) }
    }
}

impl Drop for TaskProcess {
    fn drop(&mut self) {
        let Some((mut child, running)) = self.0.take() else { return };
        // Without a runtime the daemon exits, and the process with it.
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(error) = child.kill().await {
                tracing::error!(%error, "a process cannot be killed or reaped");
            }
            drop(running);
        });
    }
}

async fn read(from: Option<impl AsyncRead + Unpin>) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(OUTPUT_MAX).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The lines that `on_line` does not take. Everything is read, so that the process never blocks on the pipe.
async fn read_words(
    from: Option<impl AsyncRead + Unpin>,
    mut on_line: impl FnMut(&[u8]) -> bool,
) -> std::io::Result<String> {
    let mut words = Vec::new();
    let Some(from) = from else { return Ok(String::new()) };
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    while (&mut from).take(LINE_MAX).read_until(b'\n', &mut line).await? > 0 {
        if !on_line(&line) && words.len() < WORDS_MAX {
            words.extend_from_slice(&line);
        }
        line.clear();
    }
    Ok(String::from_utf8_lossy(&words).into_owned())
}

#[cfg(test)]
mod test {
    use std::process::Stdio;

    use super::*;

    #[tokio::test]
    async fn lines_that_are_not_taken_are_output() {
        let mut taken = Vec::new();
        let words = read_words(Some("one\ntwo\nthree\n".as_bytes()), |line| {
            taken.push(line.to_vec());
            line == b"two\n"
        });
        assert_eq!(words.await.unwrap(), "one\nthree\n");
        assert_eq!(taken.len(), 3);
    }

    #[tokio::test]
    async fn excess_output_is_read_and_dropped() {
        let said = "word ".repeat(100_000);
        let words = read_words(Some(said.as_bytes()), |_| false).await.unwrap();
        assert!((WORDS_MAX..WORDS_MAX + 4096).contains(&words.len()), "{}", words.len());
    }

    fn shell(script: &str) -> TaskProcess {
        let mut command = tokio::process::Command::new("sh");
        TaskProcess::of(command.args(["-c", script]).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap())
    }

    #[tokio::test]
    async fn a_process_ends_with_the_work_that_needs_it() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let process = shell("trap 'exit 0' TERM; echo ready >&2; while :; do sleep 0.01; done");
        let pid = process.id().unwrap();
        // Not before its handler is there.
        let status = format!("/proc/{pid}/status");
        let handles = || {
            std::fs::read_to_string(&status).unwrap().lines().any(|line| {
                line.strip_prefix("SigCgt:")
                    .is_some_and(|set| u64::from_str_radix(set.trim(), 16).unwrap() & (1 << 14) != 0)
            })
        };
        while !handles() {
            tokio::task::yield_now().await;
        }
        sender.send(7).unwrap();
        let done = process.during("serve", async { receiver.await.map_err(|error| Problem::failed("wait", error)) });
        assert_eq!(done.await.unwrap(), 7);
        let early = shell("echo full >&2; exit 3").during("serve", std::future::pending::<Result<(), Problem>>()).await;
        let early = early.unwrap_err().detail;
        assert!(early.contains("exit status: 3") && early.contains("full"), "{early}");
    }
}
