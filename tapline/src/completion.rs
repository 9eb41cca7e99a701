//! `tapline completion`: prints the script that makes a shell complete command lines. At each completion the shell runs
//! this program ([`answer`]), which completes the words of commands, including those of the disk program and of the
//! backup program, names of the daemon's objects, and file names.
//!
//! It never reports a failure: if the daemon cannot be reached, there are no names.

use std::ffi::OsStr;
use std::time::Duration;

use api::client::Client;
use api::{Code, Problem};
use clap::{Command, CommandFactory};
use clap_complete::CompleteEnv;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::Shells;

use crate::Arguments;
use crate::endpoint::EndpointOptions;
use crate::session::print;
use crate::word;

/// The environment variable that the shell sets to request completions.
const ENVIRONMENT: &str = "TAPLINE_COMPLETE";
/// How long to wait for the daemon; the user has pressed a key.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Arguments of `completion`.
#[derive(clap::Args)]
pub struct Completion {
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

impl Completion {
    /// Prints the completion script of the shell.
    pub fn run(&self) -> Result<(), Problem> {
        let unknown = || Problem::new(Code::Invalid, format!("there is no completion for {}", self.shell));
        let shells = Shells::builtins();
        let shell = shells.completer(&self.shell).ok_or_else(unknown)?;
        let mut script = Vec::new();
        let written = shell.write_registration(ENVIRONMENT, "tapline", "tapline", "tapline", &mut script);
        written.map_err(|error| Problem::failed("write the script", error))?;
        // For bash a colon ends a word, which would split FORMAT:PATH.
        let colons = if self.shell == "bash" { "COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}\n" } else { "" };
        print(&format!("{}{colons}", String::from_utf8_lossy(&script)))
    }
}

/// Prints completions and exits if the shell requests them.
pub fn answer() {
    CompleteEnv::with_factory(command).var(ENVIRONMENT).complete();
}

/// All commands, with the completers of their arguments.
fn command() -> Command {
    let disk = arguments::Arguments::command();
    let mut tapline = Arguments::command();
    let backup = arguments::backup::BackupArguments::command();
    for (name, program) in [("image", &disk), ("serve", &disk), ("backup", &backup)] {
        if let Some(command) = program.find_subcommand(name) {
            tapline = tapline.mut_subcommand(name, |_| command.clone());
        }
    }
    tapline.mut_subcommands(with_completers)
}

/// Adds completers to the arguments of a command and of its subcommands.
fn with_completers(command: Command) -> Command {
    let noun = command.get_name().to_owned();
    command.mut_args(with_completer).mut_subcommands(move |verb| {
        let of_noun = Objects::of(&noun);
        let verb = verb.mut_args(|arg| match (arg.get_id().as_str(), of_noun) {
            // The filter of a list, and what is replaced by a restore.
            ("text" | "in_place", Some(objects)) => arg.add(ArgValueCompleter::new(objects)),
            _ => arg,
        });
        with_completers(verb)
    })
}

fn with_completer(arg: clap::Arg) -> clap::Arg {
    let names: Vec<&str> = arg.get_value_names().unwrap_or_default().iter().map(clap::builder::Str::as_str).collect();
    if names.iter().any(|name| matches!(*name, "IMAGE" | "FORMAT:PATH" | "SOURCE" | "DESTINATION")) {
        return arg.add(ArgValueCompleter::new(image));
    }
    if names.iter().any(|name| matches!(*name, "PATH" | "FILE" | "SOCKET" | "DIR" | "TARGET")) {
        return arg.add(ArgValueCompleter::new(PathCompleter::any()));
    }
    match Objects::of(arg.get_id().as_str()) {
        Some(objects) => arg.add(ArgValueCompleter::new(objects)),
        None => arg,
    }
}

/// Completes `FORMAT:PATH`: first the formats, then files with the format's extension, and directories.
fn image(current: &OsStr) -> Vec<CompletionCandidate> {
    let current = current.to_string_lossy();
    let Some((format, path)) = current.split_once(':') else {
        let formats = ["raw:", "vhd:", "qcow2:"].into_iter().filter(|format| format.starts_with(&*current));
        return formats.map(CompletionCandidate::new).collect();
    };
    let ending = (format != "raw").then(|| format.to_owned());
    let fits = move |path: &std::path::Path| {
        path.is_dir() || ending.as_deref().is_none_or(|ending| path.extension().is_some_and(|found| found == ending))
    };
    let found = PathCompleter::any().filter(fits).complete(OsStr::new(path));
    found.into_iter().map(|path| path.add_prefix(format!("{format}:"))).collect()
}

/// Kinds of the daemon's objects whose names are completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Objects {
    Sr,
    Vdi,
    Vbd,
    Vm,
    Task,
    Token,
    Target,
}

impl Objects {
    fn of(word: &str) -> Option<Objects> {
        Some(match word {
            "sr" => Objects::Sr,
            "vdi" | "snapshot" | "disk" => Objects::Vdi,
            "vbd" => Objects::Vbd,
            "vm" => Objects::Vm,
            "task" => Objects::Task,
            "token" => Objects::Token,
            "backup_target" => Objects::Target,
            _ => return None,
        })
    }

    /// The names of all objects of this kind, each with its help text.
    async fn all(self, client: &Client) -> Result<Vec<(String, String)>, Problem> {
        Ok(match self {
            Objects::Sr => {
                client.srs(None).await?.into_iter().map(|sr| (sr.name.to_string(), word::of(&sr.state))).collect()
            }
            Objects::Vdi => {
                let vdis = client.vdis(None, None).await?;
                vdis.into_iter().map(|vdi| (vdi.name.to_string(), control::size::readable(vdi.size))).collect()
            }
            Objects::Vm => {
                client.vms(None).await?.into_iter().map(|vm| (vm.name.to_string(), word::of(&vm.power))).collect()
            }
            Objects::Vbd => {
                let vbds = client.vbds(None, None, None).await?;
                vbds.into_iter().map(|vbd| (vbd.uuid.to_string(), word::of(&vbd.state))).collect()
            }
            Objects::Task => {
                client.tasks(true).await?.into_iter().map(|task| (task.uuid.to_string(), task.verb)).collect()
            }
            Objects::Target => {
                let targets = client.backup_targets(None).await?;
                targets.into_iter().map(|target| (target.name.to_string(), target.path.to_string())).collect()
            }
            Objects::Token => {
                let tokens = client.tokens().await?;
                tokens.into_iter().map(|token| (token.name.to_string(), String::new())).collect()
            }
        })
    }
}

impl ValueCompleter for Objects {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        let current = current.to_string_lossy();
        let names = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
            let (client, _) = EndpointOptions::default().client().ok()?;
            runtime.block_on(async { tokio::time::timeout(REPLY_TIMEOUT, self.all(&client)).await.ok()?.ok() })
        };
        let all = names().unwrap_or_default().into_iter();
        let fitting = all.filter(|(name, _)| name.starts_with(&*current));
        fitting.map(|(name, help)| CompletionCandidate::new(name).help(Some(help.into()))).collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn all_commands_can_be_completed() {
        let mut command = command();
        command.build();
        let serve = command.find_subcommand("serve").unwrap();
        assert!(serve.get_arguments().any(|arg| arg.get_id() == "vhost_user"));
        assert!(command.find_subcommand("image").unwrap().find_subcommand("convert").is_some());
    }

    #[test]
    fn an_image_is_completed_by_format_and_then_by_its_files() {
        let room = tempfile::tempdir().unwrap();
        for name in ["a.vhd", "b.qcow2", "c.img"] {
            std::fs::write(room.path().join(name), "").unwrap();
        }
        std::fs::create_dir(room.path().join("more")).unwrap();
        let given = |current: &str| -> Vec<String> {
            let candidates = image(OsStr::new(current));
            let mut all: Vec<_> = candidates.iter().map(|one| one.get_value().to_string_lossy().into_owned()).collect();
            all.sort();
            all
        };
        assert_eq!(given("q"), ["qcow2:"]);
        assert_eq!(given("").len(), 3);
        let room = room.path().display().to_string();
        assert_eq!(given(&format!("vhd:{room}/")), [format!("vhd:{room}/a.vhd"), format!("vhd:{room}/more/")]);
        assert_eq!(given(&format!("raw:{room}/")).len(), 4);
    }
}
