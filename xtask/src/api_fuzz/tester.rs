//! schemathesis, in an environment of Python's own below `build/`: fetched once, in the one version that was tried.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use testbed::tool;

/// A later one may ask otherwise, and find what this one does not: that is for a commit of ours, and not for a Monday.
const VERSION: &str = "4.32.0";

/// How long an answer may take, in seconds: a wait for a task is a minute at most.
const TO_ANSWER: &str = "90";

/// The program that asks.
pub struct Tester {
    directory: PathBuf,
}

/// Whom to ask, and how to be let in.
pub struct Target {
    /// `https://127.0.0.1:PORT`.
    pub url: String,
    /// The certificate that vouches for it.
    pub ca: PathBuf,
    /// The secret of a token.
    pub token: String,
    /// What there is, as a configuration of schemathesis.
    pub hints: String,
}

impl Tester {
    /// The one below `build`, fetched if need be; or why it cannot be had.
    pub fn install(build: &Path) -> Result<Tester, String> {
        let tester = Tester { directory: build.join(format!("schemathesis-{VERSION}")) };
        if tester.program("st").is_file() {
            return Ok(tester);
        }
        println!("fetching schemathesis {VERSION}");
        let failed = |error: tool::ToolError| format!("schemathesis cannot be had: {error}");
        tool::text(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&tester.directory)).map_err(failed)?;
        let mut pip = Command::new(tester.program("pip"));
        pip.args(["install", "--quiet", "--disable-pip-version-check", &format!("schemathesis=={VERSION}")]);
        tool::text(&mut pip).map_err(failed)?;
        Ok(tester)
    }

    fn program(&self, name: &str) -> PathBuf {
        self.directory.join("bin").join(name)
    }

    /// Asks for everything in the document.
    pub fn ask(&self, document: &Path, target: &Target, max_examples: u32, seed: u64) -> Result<(), String> {
        let work = self.directory.join("work");
        fs::create_dir_all(&work).map_err(|error| format!("{}: {error}", work.display()))?;
        let config = work.join("schemathesis.toml");
        fs::write(&config, &target.hints).map_err(|error| format!("{}: {error}", config.display()))?;
        let mut st = Command::new(self.program("st"));
        st.arg("--config-file")
            .arg(&config)
            .arg("run")
            .arg(document)
            .args(["--url", &target.url])
            .arg("--tls-verify")
            .arg(&target.ca);
        st.args(["--header", &format!("Authorization: Bearer {}", target.token)]);
        st.args(["--seed", &seed.to_string(), "--max-examples", &max_examples.to_string()]);
        st.args(["--request-timeout", TO_ANSWER, "--generation-database", "none", "--workers", "2", "--no-color"]);
        // What may be done depends on what there is, which a document does not say: a plug of what is plugged is
        // rightly refused.
        st.args(["--checks", "all", "--exclude-checks", "positive_data_acceptance"]);
        // The stream of events has no end, which is not what this tester waits for.
        st.args(["--exclude-path", "/v1/events"]);
        let status =
            st.current_dir(&work).status().map_err(|error| format!("cannot run {}: {error}", tool::line_of(&st)))?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("the API is not as its document says ({status}): see above"))
        }
    }

    /// Has SQLite judge a catalogue that nobody uses.
    pub fn check_catalogue(&self, catalogue: &Path) -> Result<(), String> {
        let mut python = Command::new(self.program("python"));
        python.args(["-c", include_str!("catalogue.py")]).arg(catalogue);
        tool::text(&mut python).map(drop).map_err(|error| format!("the catalogue is not sound: {error}"))
    }
}
