// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The command line; the man pages and the completions are made of it, too.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::ends::{self, Routing, Service};
use crate::failure::{Context, Failure, Outcome};
use crate::output::{note, Format};
use crate::{doctor, list, ping, rmpp, show, sniff};

const EXIT_CODES: &str = "Exit codes:\n  \
    0  done, and all is well\n  \
    1  done, and something is wrong: packets were lost, the doctor found a problem\n  \
    2  the arguments are wrong\n  \
    3  it cannot be done here: ib_umad is not loaded or lacks something, or a permission is missing";

/// Looks into ib_umad, which gives programs InfiniBand MADs: its ports, who has them open, the MADs that
/// pass, and why something does not work.
///
/// It works with the ib_umad of umad-rs and with the C module; what only the former can do, it says.
#[derive(Debug, Parser)]
#[command(name = "umadctl", version, after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
pub struct Cli {
    /// Print JSON: one document, or one a line where there is no end (sniff, show --watch)
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the ports: node, device, state, addresses, queue pairs, issm node, device numbers
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    List,
    /// Show who has which port open: agents, queue depths, outstanding sends, counters
    ///
    /// Without root only the processes of the same user can be looked into; how many others there are is
    /// said. The C module says nothing of its files: there, only who has a node open is shown, and the
    /// exit code is 3.
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Show(Show),
    /// Exchange requests and responses between two ports of this machine, and time them
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Ping(Ping),
    /// Send long messages (RMPP) between two ports of this machine, and check every byte
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Rmpp(Rmpp),
    /// Show the MADs that programs write and read, by ib_umad's tracepoints; for root
    ///
    /// An arrow says where a MAD goes: -> it was written, <- it came from the port and was read, !! it is
    /// a request that was not answered and came back. While this runs ib_umad cannot be unloaded.
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Sniff(Sniff),
    /// Find out which ib_umad is loaded, why a node is missing, why an open would fail, what holds the module
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Doctor,
    /// Print the completions for a shell
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Write the man pages
    Man {
        /// The folder to write them to
        folder: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Show {
    /// Look again and again, every SECONDS (1 unless given)
    #[arg(long, short, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = positive_seconds)]
    watch: Option<Duration>,
    /// With --watch: end after so many looks
    #[arg(long, short, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
}

/// Between which ports, and how.
#[derive(Debug, Args)]
struct Way {
    /// The port that sends: umad0, a device, or device and port as in mlx5_0/1
    from: String,
    /// The port that receives; MADs go to its LID, or on RoCE to its GID
    to: String,
    /// Vendor class to use, 0x30 to 0x4f
    #[arg(long, value_name = "CLASS", default_value = "0x32", value_parser = vendor_class)]
    class: u8,
    /// Vendor (OUI) to use
    #[arg(long, value_name = "OUI", default_value = "0x001405", value_parser = oui)]
    oui: u32,
    /// On InfiniBand: with the GID, too, as through a router
    #[arg(long)]
    gid: bool,
    /// Index of the sender's GID
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    gid_index: u8,
    /// Index of the receiver's GID
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    peer_gid_index: u8,
    /// Service level
    #[arg(long, value_name = "SL", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..16))]
    sl: u8,
    /// Print only the sums
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Debug, Args)]
struct Ping {
    #[command(flatten)]
    way: Way,
    /// So many round trips; 0: until Ctrl-C
    #[arg(long, short, value_name = "N", default_value_t = 5)]
    count: u32,
    /// From one request to the next
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// How long to wait for an answer
    #[arg(long, short = 'W', value_name = "SECONDS", default_value = "1", value_parser = positive_seconds)]
    timeout: Duration,
}

#[derive(Debug, Args)]
struct Rmpp {
    #[command(flatten)]
    way: Way,
    /// So many messages; 0: until Ctrl-C
    #[arg(long, short, value_name = "N", default_value_t = 1)]
    count: u32,
    /// Bytes of a message
    #[arg(long, short, value_name = "BYTES", default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    size: u32,
    /// How long a message may take
    #[arg(long, short = 'W', value_name = "SECONDS", default_value = "30", value_parser = positive_seconds)]
    timeout: Duration,
}

#[derive(Debug, Args)]
struct Sniff {
    /// End after so many MADs
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Only those of a port: umad0, a device, or device and port as in mlx5_0/1
    #[arg(long, short, value_name = "PORT")]
    port: Option<String>,
    /// Only those of a management class
    #[arg(long, value_name = "CLASS", value_parser = class)]
    class: Option<u8>,
}

/// A number, decimal or with 0x in front.
fn number(text: &str) -> Result<u32, String> {
    crate::ports::number(text)
        .ok_or_else(|| "not a number (decimal, or 0x and hexadecimal)".to_owned())
}

fn class(text: &str) -> Result<u8, String> {
    u8::try_from(number(text)?).map_err(|_| "a class is at most 0xff".to_owned())
}

fn vendor_class(text: &str) -> Result<u8, String> {
    match class(text)? {
        class @ 0x30..=0x4f => Ok(class),
        _ => Err("a vendor class with OUI and RMPP is from 0x30 to 0x4f".to_owned()),
    }
}

fn oui(text: &str) -> Result<u32, String> {
    match number(text)? {
        0 => Err("an OUI is not 0".to_owned()),
        oui @ 1..=0xff_ffff => Ok(oui),
        _ => Err("an OUI has 24 bits".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if time <= Duration::from_secs(1_000_000) => Ok(time),
        _ => Err("from 0 to 1000000 seconds".to_owned()),
    }
}

fn positive_seconds(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        // The kernel counts milliseconds.
        time if time < Duration::from_millis(1) => Err("at least 0.001 seconds".to_owned()),
        time => Ok(time),
    }
}

impl From<Way> for ends::Way {
    fn from(way: Way) -> Self {
        Self {
            from: way.from,
            to: way.to,
            service: Service {
                class: way.class,
                oui: way.oui,
            },
            routing: Routing {
                by_gid: way.gid,
                gid_index: way.gid_index,
                peer_gid_index: way.peer_gid_index,
                sl: way.sl,
            },
            quiet: way.quiet,
        }
    }
}

impl Command {
    fn run(self, format: Format) -> Outcome {
        match self {
            Self::List => list::run(format),
            Self::Show(show) => show::run(
                show::Wanted {
                    watch: show.watch,
                    count: show.count,
                },
                format,
            ),
            Self::Ping(ping) => {
                let wanted = ping::Wanted {
                    way: ping.way.into(),
                    count: ping.count,
                    interval: ping.interval,
                    timeout: ping.timeout,
                };
                ping::run(&wanted, format)
            }
            Self::Rmpp(rmpp) => {
                let wanted = rmpp::Wanted {
                    way: rmpp.way.into(),
                    count: rmpp.count,
                    size: usize::try_from(rmpp.size).unwrap_or(usize::MAX),
                    timeout: rmpp.timeout,
                };
                rmpp::run(&wanted, format)
            }
            Self::Sniff(sniff) => {
                let wanted = sniff::Wanted {
                    count: sniff.count,
                    port: sniff.port,
                    class: sniff.class,
                };
                sniff::run(&wanted, format)
            }
            Self::Doctor => doctor::run(format),
            Self::Completion { shell } => {
                let mut text = Vec::new();
                clap_complete::generate(shell, &mut Cli::command(), "umadctl", &mut text);
                crate::output::print(String::from_utf8_lossy(&text))
            }
            Self::Man { folder } => write_man_pages(&folder),
        }
    }
}

fn write_man_pages(folder: &Path) -> Outcome {
    std::fs::create_dir_all(folder).what(folder.display())?;
    clap_mangen::generate_to(Cli::command(), folder)
        .map_err(|e: io::Error| Failure::new(format!("{}: {e}", folder.display())))
}

/// Does what the command line says.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let format = if cli.json { Format::Json } else { Format::Text };
    match cli.command.run(format) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.what.is_empty() {
                note(&failure.what);
            }
            if let Some(hint) = &failure.hint {
                note(hint);
            }
            ExitCode::from(failure.code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn numbers_and_times() {
        assert_eq!(vendor_class("0x32"), Ok(0x32));
        assert_eq!(vendor_class("50"), Ok(50));
        assert!(vendor_class("0x81").is_err() && vendor_class("x").is_err());
        assert_eq!(oui("0x001405"), Ok(0x1405));
        assert!(oui("0").is_err() && oui("0x1000000").is_err());
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for text in ["", "-1", "nan", "inf", "1e9", "x"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert!(positive_seconds("0").is_err());
    }

    #[test]
    fn watch_takes_its_time_or_not() {
        let watch = |words: &[&str]| match Cli::try_parse_from(words).map(|cli| cli.command) {
            Ok(Command::Show(show)) => show.watch,
            other => panic!("{other:?}"),
        };
        assert_eq!(watch(&["umadctl", "show"]), None);
        assert_eq!(
            watch(&["umadctl", "show", "--watch"]),
            Some(Duration::from_secs(1))
        );
        assert_eq!(
            watch(&["umadctl", "show", "-w=2", "--json"]),
            Some(Duration::from_secs(2))
        );
        assert!(Cli::try_parse_from(["umadctl", "show", "-c", "2"]).is_err());
    }
}
