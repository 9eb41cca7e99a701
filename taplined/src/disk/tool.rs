//! Runs image jobs: one process each, which is handed its files, has no rights of its own, and ends with the job.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use api::{Code, Problem};
use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};

use super::handing::Handing;
use crate::config::Config;

/// The program, which lies beside this one or in the PATH.
const PROGRAM: &str = "tapline-disk";

/// Bytes of a process's answer, and of its last words. The longest is the map of a disk.
const OUTPUT_MAX: u64 = 64 << 20;
const WORDS_MAX: u64 = 16 << 10;

/// How disk processes are started.
#[derive(Clone, Debug)]
pub struct Tool {
    program: PathBuf,
    /// The user and group they run as; the daemon's own if it cannot change that.
    user: Option<(u32, u32)>,
}

impl Tool {
    /// As the settings say.
    pub fn of(config: &Config) -> Result<Tool, Problem> {
        let beside =
            || std::env::current_exe().ok().and_then(|me| me.parent().map(|directory| directory.join(PROGRAM)));
        let program = config.disk_program.clone().or_else(|| beside().filter(|path| path.is_file()));
        let user = match rustix::process::geteuid().is_root() {
            true => Some(user_id(&config.disk_user)?),
            false => None,
        };
        Ok(Tool { program: program.unwrap_or_else(|| PROGRAM.into()), user })
    }

    /// A disk process that is not started yet.
    pub fn command(&self, words: &[OsString]) -> Command {
        let mut command = std::process::Command::new(&self.program);
        command.args(words).current_dir("/").process_group(0).env_clear();
        if let Some((uid, gid)) = self.user {
            // Other groups go with the change of the user.
            command.uid(uid).gid(gid);
        }
        command.into()
    }

    /// Runs `image VERB …`, and gives what it has printed. Dropped before its end, it ends the process.
    pub async fn image(&self, words: Vec<OsString>, handing: Handing) -> Result<Value, Problem> {
        let mut all: Vec<OsString> = vec!["image".into()];
        all.extend(words);
        all.extend(["--json".into(), "--handed".into()]);
        let (stdin, ready) = handing.prepare()?;
        let mut command = self.command(&all);
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let started = command.spawn();
        // Our copy of its end of the socket would keep the socket open behind its end.
        drop(command);
        let mut child = started.map_err(|error| self.not_started(error))?;
        let sent = tokio::task::spawn_blocking(move || ready.send());
        let (output, words) = read_both(&mut child).await?;
        let status = child.wait().await.map_err(|error| Problem::failed("wait for a disk process", error))?;
        match status.code() {
            Some(0) if output.trim().is_empty() => Ok(Value::Null),
            Some(0) => {
                serde_json::from_str(&output).map_err(|error| Problem::failed("understand a disk process", error))
            }
            Some(_) => Err(said(&words)),
            None => {
                // It was killed; that nothing could be handed to it is no news then.
                drop(sent.await);
                Err(Problem::new(Code::Failed, format!("a disk process has ended: {status}")))
            }
        }
    }

    /// Why a process could not be started.
    pub fn not_started(&self, error: std::io::Error) -> Problem {
        Problem::failed(format_args!("start {}", self.program.display()), error)
            .advise(format!("install {PROGRAM} beside taplined, or set disk-program"))
    }
}

async fn read_both(child: &mut Child) -> Result<(String, String), Problem> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (output, words) = tokio::join!(read(stdout, OUTPUT_MAX), read(stderr, WORDS_MAX));
    Ok((output?, words?))
}

async fn read(from: Option<impl tokio::io::AsyncRead + Unpin>, max: u64) -> Result<String, Problem> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        let read = from.take(max).read_to_end(&mut bytes).await;
        read.map_err(|error| Problem::failed("hear a disk process", error))?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The last words of a disk process: what it could not do, and in the line below that what to do.
pub fn said(words: &str) -> Problem {
    let lines = || words.lines().map(str::trim).filter(|line| !line.is_empty());
    // A refused command line has no such line; what has been said before it failed has none either.
    let begin = lines().position(|line| line.starts_with("tapline: ")).unwrap_or(0);
    let mut lines = lines().skip(begin);
    let what = lines.next().unwrap_or("a disk process failed without a word");
    let what = what.strip_prefix("tapline: ").unwrap_or(what);
    let code = if what.contains("No space left on device") { Code::NoSpace } else { Code::Failed };
    let problem = Problem::new(code, what);
    match lines.next() {
        Some(advice) if !advice.is_empty() => problem.advise(advice),
        _ => problem,
    }
}

/// The numbers of a user, from passwd(5).
fn user_id(name: &str) -> Result<(u32, u32), Problem> {
    let path = Path::new("/etc/passwd");
    let users = std::fs::read_to_string(path).map_err(|error| Problem::failed("read /etc/passwd", error))?;
    let found = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let named = fields.next() == Some(name);
        let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
        named.then_some((uid, gid))
    });
    found.ok_or_else(|| Problem::new(Code::Invalid, format!("disk-user: there is no user {name}")))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn last_words_are_a_message_and_an_advice() {
        let problem = said("tapline: cannot open vhd:/a: it is in use\n  end whoever uses it\n");
        assert_eq!(problem.message, "cannot open vhd:/a: it is in use");
        assert_eq!(problem.advice.as_deref(), Some("end whoever uses it"));
        assert_eq!(said("tapline: cannot write: No space left on device (os error 28)").code, Code::NoSpace);
        assert_eq!(said("").code, Code::Failed);
    }

    #[test]
    fn root_has_the_number_that_it_has_everywhere() {
        assert_eq!(user_id("root").unwrap(), (0, 0));
        assert_eq!(user_id("no such user").unwrap_err().code, Code::Invalid);
    }
}
