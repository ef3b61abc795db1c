# nix run 'git+file:///path/to/checkout?dir=contrib/packaging' -- demo
{
  description = "A job scheduler for one shared machine whose only interface is a directory";
  inputs.nixpkgs.url = "nixpkgs";
  outputs =
    { self, nixpkgs }:
    let
      systems = [
        "x86_64-linux"
        "aarch64-linux"
      ];
      each = make: nixpkgs.lib.genAttrs systems (system: make nixpkgs.legacyPackages.${system});
    in
    {
      packages = each (pkgs: {
        default = pkgs.python3Packages.buildPythonApplication {
          pname = "spool-scheduler";
          version = "0.1.0";
          pyproject = true;
          src = ../..;
          build-system = [ pkgs.python3Packages.hatchling ];
          dependencies = with pkgs.python3Packages; [
            click
            filelock
            jinja2
            libtmux
            msgspec
            nvidia-ml-py
            psutil
            rich
            textual
            tomli
            tomli-w
            tomlkit
            watchdog
          ];
          pythonRelaxDeps = true;
          # The tests start real jobs and need more than the sandbox has.
          doCheck = false;
          pythonImportsCheck = [ "spool" ];
          meta.mainProgram = "spool";
          meta.license = pkgs.lib.licenses.mit;
          meta.platforms = systems;
        };
      });
    };
}
