// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `rdmacm`: connections of the kernel's `rdma_cm` are made, or rejected, through the same queue pair
//! as programs' MADs; a call that waits for its page of memory does not keep them waiting.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use ktap::peers::SOON;
use ktap::prelude::*;
use selftests::cm::Cm;
use selftests::figure::median_of;
use selftests::stuck::{at_each_place, scene, Place, Stuck};

/// Attempts that a median is made of.
const ATTEMPTS: usize = 15;

/// How long an attempt may take.
const ATTEMPT: Duration = Duration::from_secs(3);

/// The middle one of some attempts to connect from `rxe0` to `rxe1`, where nobody listens.
fn attempts(what: &str) -> Outcome<Duration> {
    median_of(what, ATTEMPTS, ATTEMPT, attempt)
}

fn attempt() -> Outcome {
    let to = umad::sysfs::gid("rxe1", 1, 0)?;
    let index = std::fs::read_to_string("/sys/class/net/d0/ifindex")?;
    Cm::open()?.be_rejected(to, index.trim().parse()?, ktap::patient(SOON))
}

fn beside_stuck(place: Place) -> Outcome {
    let scene = scene("rxe0", "rxe1")?;
    let name = place.name();
    // The first one finds the neighbour.
    attempt()?;
    let before = attempts("rdma_cm is rejected, nobody stuck")?;
    let mut stuck = Stuck::at(place, &scene)?;
    let measured = (|| {
        // A MAD for the file: from here on, whoever receives wants what the stuck call may hold.
        let mad = scene.b.packet(&scene.a, Method::SEND, fresh_tid());
        scene.b.port.send(&mad)?;
        attempts(&format!("rdma_cm is rejected, {name}"))
    })();
    // Before the verdict, so that everything ends.
    stuck.release()??;
    let beside = measured?;
    ensure!(
        beside < before * 10 + Duration::from_millis(50),
        "{beside:?}, without the stuck call {before:?}"
    );
    Ok(())
}

/// The modules of `rdma_cm`; they go with the value. Not all devices of other areas are fit for `ib_cm`.
struct Modules;

impl Modules {
    fn load() -> Outcome<Self> {
        run("modprobe rdma_ucm")?;
        let modules = Self;
        wait_until("rdma_cm has its node", SOON, || Cm::open().is_ok())?;
        Ok(modules)
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        for module in ["rdma_ucm", "rdma_cm", "iw_cm", "ib_cm"] {
            let _ = wait_until("the module goes", SOON, || {
                !std::path::Path::new("/sys/module").join(module).exists()
                    || run(&format!("rmmod {module}")).is_ok()
            });
        }
    }
}

fn main() -> ExitCode {
    let mut area = ktap::Area::new("rdmacm");
    at_each_place(&mut area, "rdma_cm goes on", beside_stuck);
    match Modules::load() {
        Ok(modules) => {
            let code = area.run();
            drop(modules);
            code
        }
        Err(why) => {
            println!("KTAP version 1\nBail out! {why:?}");
            ExitCode::FAILURE
        }
    }
}
